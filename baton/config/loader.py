"""Builds the structs of settings from plain mappings of files, the environment and the command line.

Keys are field names, dotted where one struct contains another. Errors name the full key, and for an unknown
key the nearest known one.
"""

import ast
import difflib
import importlib
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from baton.errors import ConfigError, nearest_hint

StructT = TypeVar("StructT", bound=msgspec.Struct)
MAX_SHOWN: Final = 500  # characters of a wrong value in an error
_DURATION: Final = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,9})?)(?P<unit>[smh]?)")
_UNITS_S: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
HIDDEN: Final = "***"
# The part of a URL after ://. A URL of any other form is hidden whole: it may contain a password.
_PLAIN_URL: Final = re.compile(r"(?:[^@?#/]*@)?(?P<place>[\w.,:\[\]-]+(?:/[\w./-]*)?)(?:\?[^@]*)?")
BYTE_UNITS: Final = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def build(struct_type: type[StructT], settings: object, prefix: str = "") -> StructT:
    """Return the struct in a nested mapping; a part may be its struct already.

    Sizes in bytes may be written "4GiB". Raises ConfigError with the full dotted key on an unknown key, a
    wrong type or a bad value, and the errors of the struct's own checks.
    """
    if isinstance(settings, struct_type):  # its types are unchecked
        settings = msgspec.structs.asdict(settings)
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{prefix or 'config'}: expected a mapping, got {_show(settings)}")
    fields = {_join(prefix, field.name): field for field in msgspec.structs.fields(struct_type)}
    values = {}
    for name, value in settings.items():
        key = _join(prefix, name)
        if key not in fields:
            raise ConfigError(unknown_key(key, known_keys(struct_type, prefix)))
        values[fields[key].name] = _value(fields[key].type, value, key)
    for key, field in fields.items():
        if field.required and field.name not in values:
            raise ConfigError(f"{key}: expected a value, got none")
    return struct_type(**values)


def _join(prefix: str, name: object) -> str:
    return f"{prefix}.{name}" if prefix else str(name)


def _value(expected: Any, value: object, key: str) -> Any:
    struct = _struct_in(expected)
    if struct is not None and value is not None:
        return build(struct, value, key)
    of_name = _struct_by_name(expected)
    if of_name is not None and isinstance(value, Mapping):
        return {str(name): build(of_name, each, f"{key}.{name}") for name, each in value.items()}
    if key.endswith("_bytes") and isinstance(value, str):
        try:
            value = parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None
    try:
        return msgspec.convert(value, expected)
    except msgspec.ValidationError:
        raise ConfigError(f"{key}: expected {_describe(expected)}, got {_show(value)}") from None


def unknown_key(key: str, known: list[str]) -> str:
    """Return the error message for an unknown key."""
    # Leaves are compared first: a shared prefix would make any two keys of one section look alike.
    leaf_of = {name: name.rpartition(".")[2] for name in known}
    nearest = difflib.get_close_matches(key.rpartition(".")[2], leaf_of.values())
    alike = [name for name, leaf in leaf_of.items() if leaf in nearest]
    best = difflib.get_close_matches(key, alike, n=1, cutoff=0.0)
    hint = f"did you mean {best[0]!r}?" if best else f"known keys are {', '.join(known)}"
    return f"unknown configuration key {key!r}; {hint}"


def known_keys(struct_type: type[msgspec.Struct], prefix: str = "") -> list[str]:
    """Return the dotted keys of a struct and of the structs inside it, outermost first."""
    fields = msgspec.structs.fields(struct_type)
    own = [_join(prefix, field.name) for field in fields]
    nested = [known_keys(field.type, _join(prefix, field.name)) for field in fields if _is_struct(field.type)]
    return own + [key for keys in nested for key in keys]


def import_named(setting: str, name: str) -> Any:
    """Return what `package.module:Name` names, as the value of a setting; ConfigError when that fails."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # an import may raise any error
        raise ConfigError(f"{setting}: {name!r} cannot be imported: {error}") from error


def import_class(setting: str, name: str, protocol: type, known: Collection[str]) -> Any:
    """Return the class that `package.module:Class` names, as the value of a setting.

    Raises ConfigError when the class cannot be imported or lacks a member of the protocol; for a name without
    a module, with the `known` names and the nearest of them.
    """
    if ":" not in name:
        expected = f"expected one of {', '.join(known)} or package.module:Class"
        raise ConfigError(f"{setting}: {expected}, got {name!r}{nearest_hint(name, known)}")
    found = import_named(setting, name)
    members = [each for each in (*vars(protocol), *protocol.__annotations__) if not each.startswith("_")]
    missing = [each for each in members if not hasattr(found, each)]
    if missing:
        raise ConfigError(f"{setting}: {name!r} is no {protocol.__name__}: it lacks {', '.join(missing)}")
    return found


def leaves(struct_type: type[msgspec.Struct], prefix: str = "") -> dict[str, msgspec.structs.FieldInfo]:
    """Return dotted key -> field, for every field that is no struct itself."""
    found = {}
    for field in msgspec.structs.fields(struct_type):
        key = _join(prefix, field.name)
        found.update(leaves(field.type, key) if _is_struct(field.type) else {key: field})
    return found


def flatten(settings: Mapping[str, object], known: Collection[str], prefix: str = "") -> dict[str, object]:
    """Return dotted key -> value of a nested mapping.

    known: leaves; their values may be mappings themselves.
    """
    flat: dict[str, object] = {}
    for name, value in settings.items():
        key = _join(prefix, name)
        if isinstance(value, Mapping) and key not in known:
            flat.update(flatten(value, known, key))
        else:
            flat[key] = value
    return flat


def nest(flat: Mapping[str, object]) -> dict[str, Any]:
    """Return the nested mapping of dotted keys."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *path, leaf = key.split(".")
        part = nested
        for name in path:
            part = part.setdefault(name, {})
        part[leaf] = value
    return nested


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings with the values of `changes` in place of their own."""
    changed = {
        name: merged(settings[name], value)
        if isinstance(value, Mapping) and isinstance(settings.get(name), Mapping)
        else value
        for name, value in changes.items()
    }
    return {**settings, **changed}


def from_text(field: msgspec.structs.FieldInfo, text: str, key: str) -> object:
    """Return the value in the text of an environment variable; values other than strings may be JSON."""
    if key.endswith("_bytes"):
        return text
    try:
        return msgspec.convert(text, field.type, strict=False)
    except msgspec.ValidationError:
        pass
    try:
        if _struct_in(field.type) is not None or _struct_by_name(field.type) is not None:
            return _value(field.type, msgspec.json.decode(text), key)
        return msgspec.json.decode(text, type=field.type)
    except msgspec.MsgspecError:
        raise ConfigError(f"{key}: expected {_describe(field.type)}, got {text!r}") from None


def _struct_in(expected: Any) -> type[msgspec.Struct] | None:
    """The struct that a value is, unless it is None."""
    parts = get_args(expected) if get_origin(expected) in (Annotated, Union, UnionType) else ()
    return next((each for each in (expected, *parts) if _is_struct(each)), None)


def _struct_by_name(expected: Any) -> type[msgspec.Struct] | None:
    """The struct of the values of a mapping by name; None: the type is no such mapping."""
    return _struct_in(get_args(expected)[1]) if get_origin(expected) is dict else None


def _is_struct(expected: Any) -> bool:
    return isinstance(expected, type) and issubclass(expected, msgspec.Struct)


def _describe(expected: Any) -> str:
    origin, arguments = get_origin(expected), get_args(expected)
    if origin is Annotated:
        return _describe(arguments[0]) + "".join(map(_bounds, arguments[1:]))
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if origin in (Union, UnionType):
        return " | ".join(_describe(argument) for argument in arguments)
    if origin is dict or _is_struct(expected):
        return "a mapping"
    if expected is NoneType:
        return "None"
    return expected.__name__ if isinstance(expected, type) and not arguments else str(expected)


def _bounds(meta: object) -> str:
    if not isinstance(meta, msgspec.Meta):
        return ""
    words = {"at least": meta.ge, "more than": meta.gt, "at most": meta.le, "less than": meta.lt}
    return "".join(f", {word} {bound}" for word, bound in words.items() if bound is not None)


def _show(value: object) -> str:
    try:
        shown = repr(value)
    except ValueError:  # a number, of more digits than Python writes
        shown = "a number of too many digits"
    end = "..." if len(shown) > MAX_SHOWN else ""
    return f"{shown[:MAX_SHOWN]}{end} ({type(value).__name__})"


def parse_bytes(text: str) -> int:
    """Return the bytes in "4GiB", "512 MiB", "1.5GB" or "4096"; raises ConfigError for other text."""
    match = re.fullmatch(r"\s*(\d{1,19}(?:\.\d{1,19})?)\s*([A-Za-z]*)\s*", text)
    unit = BYTE_UNITS.get(match[2] or "B") if match else None
    if match is None or unit is None:
        raise ConfigError(f'expected a size such as "4GiB" (units {", ".join(BYTE_UNITS)}), got {text!r}')
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


def duration_s(text: str, name: str) -> float:
    """Read a time such as 90s, 15m or 2h. Raises ConfigError with `name`."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ConfigError(f"{name}: expected a time such as 90s, 15m or 2h, got {text!r}")
    return float(found["number"]) * _UNITS_S[found["unit"]]


def described_schema(struct_type: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schema of a settings struct, with a description for every commented field.

    `baton config schema` prints it, so the comments of settings are written for operators.
    """
    schema = msgspec.json.schema(struct_type)
    for part in _structs(struct_type):
        properties = schema["$defs"][part.__name__].get("properties", {})  # array_like structs have none
        for name, comment in comments(part).items():
            if name in properties:
                properties[name] = properties[name] | {"description": comment}
    return schema


@cache
def comments(struct_type: type[msgspec.Struct]) -> dict[str, str]:
    """Return field name -> comment, inherited fields included; fields without a comment are left out.

    A comment stands behind its field or in the lines above it:
        port: int = 8000  # to listen on for clients; 0: any that is free
    """
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


def without_credentials(config: StructT) -> StructT:
    """The settings with no user name, password or query in any URL."""
    fields = {name: getattr(config, name) for name in config.__struct_fields__}
    return msgspec.structs.replace(config, **{name: _bare(value) for name, value in fields.items()})


def _bare(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return without_credentials(value)
    if isinstance(value, tuple | list):
        return type(value)(map(_bare, value))
    if not isinstance(value, str) or "://" not in value:
        return value
    scheme, _, rest = value.partition("://")
    found = _PLAIN_URL.fullmatch(rest)
    return f"{scheme}://{HIDDEN}" if found is None else f"{scheme}://{found['place']}"
