"""Descriptions of settings, read from the comments in the structs that define the settings.

A setting's comment stands behind its field or in the lines above it:

    port: int = 8000  # to listen on for clients; 0: any that is free

`baton config schema` puts these comments into the JSON schema, so they are written for operators.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec


def described_schema(struct_type: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schema of a settings struct, with a description for every commented field."""
    schema = msgspec.json.schema(struct_type)
    for part in _structs(struct_type):
        properties = schema["$defs"][part.__name__].get("properties", {})  # array_like structs have none
        for name, comment in comments(part).items():
            if name in properties:
                properties[name] = properties[name] | {"description": comment}
    return schema


@cache
def comments(struct_type: type[msgspec.Struct]) -> dict[str, str]:
    """Return field name -> comment, inherited fields included; fields without a comment are left out."""
    found: dict[str, str] = {}
    for part in reversed(struct_type.__mro__):
        if issubclass(part, msgspec.Struct) and part is not msgspec.Struct:
            found.update(_own_comments(part))
    return found


def _own_comments(struct_type: type[msgspec.Struct]) -> dict[str, str]:
    try:
        lines = textwrap.dedent(inspect.getsource(struct_type)).splitlines()
    except OSError:  # installed without its source
        return {}
    (definition,) = ast.parse("\n".join(lines)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field in definition.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.end_lineno:
            behind = lines[field.end_lineno - 1].encode()[field.end_col_offset :].decode().strip()
            words = _above(lines, field.lineno - 1) if not behind.startswith("#") else [behind]
            if words:
                found[field.target.id] = " ".join(line.strip("# ") for line in words)
    return found


def _above(lines: list[str], field: int) -> list[str]:
    """Return the comment lines that end just above a line."""
    first = field
    while lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return lines[first:field]


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the struct that a type is or contains, and the structs of its fields, each of them once."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        parts = [part for field in msgspec.structs.fields(kind) for part in _structs(field.type)]
        yield from dict.fromkeys([kind, *parts])
    elif get_origin(kind) in (Annotated, Union, UnionType, tuple, dict):
        for argument in get_args(kind):
            yield from _structs(argument)
