"""Keys put into a tenants file and taken out of it; everything else stays as its author wrote it.

The text is changed where YAML says that keys stand. What comes out is read again: unless it is the same file
but for those keys, nothing of it is used.
"""

import re
from collections.abc import Collection
from typing import Any, Final

import msgspec
import yaml

from baton.errors import ConfigError
from baton.gateway.tenants_file import Entry, TenantsFile, parse_tenants

FRESH: Final = "tenants: {}\n"
INDENT: Final = 2
PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")


def with_key(text: str, tenant: str, key: str) -> str:
    """The file with one more key, "sha256:" and its digits; the tenant is made where there is none.

    Raises ConfigError for a file that is wrong, and for one that has to be changed by hand.
    """
    text = text if text.strip() else FRESH
    file = parse_tenants(text, "the file")
    entry = file.tenants.get(tenant, Entry(keys=()))
    entry = msgspec.structs.replace(entry, keys=(*entry.keys, key))
    expected = msgspec.structs.replace(file, tenants=file.tenants | {tenant: entry})
    root = yaml.compose(text, yaml.SafeLoader)
    if tenant in file.tenants:
        keys = _value(_value(_value(root, "tenants"), tenant), "keys")
        changed = _with_item(text, keys, key)
    else:
        changed = _with_tenant(text, root, tenant, key)
    return _checked(changed, expected, f"add {key} to tenants.{tenant}.keys")


def without_keys(text: str, keys: Collection[str]) -> str:
    """The file with none of these. Raises ConfigError as above."""
    file = parse_tenants(text, "the file")
    for name, entry in file.tenants.items():
        left = tuple(key for key in entry.keys if key not in keys)
        if left == entry.keys:
            continue
        entry = msgspec.structs.replace(entry, keys=left)
        file = msgspec.structs.replace(file, tenants=file.tenants | {name: entry})
        node = _value(_value(_value(yaml.compose(text, yaml.SafeLoader), "tenants"), name), "keys")
        text = _checked(_with_items(text, node, left), file, f"take them out of tenants.{name}.keys")
    return text


def _checked(text: str | None, expected: TenantsFile, by_hand: str) -> str:
    try:
        if text is not None and parse_tenants(text, "") == expected:
            return text
    except ConfigError:
        pass
    raise ConfigError(f"the file is written in a way that must be changed by hand: {by_hand}")


def _value(mapping: Any, name: str) -> Any:
    """The node of a mapping's value; None where there is none."""
    if isinstance(mapping, yaml.MappingNode):
        for key, value in mapping.value:
            if key.value == name:
                return value
    return None


def _with_tenant(text: str, root: Any, name: str, key: str) -> str:
    tenants = _value(root, "tenants")
    is_plain = PLAIN.fullmatch(name) and yaml.load(name, yaml.SafeLoader) == name  # unlike 1, or no
    name = name if is_plain else f'"{name}"'
    if not tenants.flow_style:
        column = tenants.value[0][0].start_mark.column
        line = (
            f'{" " * column}{name}:\n{" " * (column + INDENT)}keys:\n{" " * (column + 2 * INDENT)}- "{key}"\n'
        )
        return _after_line(text, _end(tenants), line)
    if tenants.value or root.flow_style:
        return _before_bracket(text, tenants, f'{name}: {{keys: ["{key}"]}}')
    own = f'\n{" " * INDENT}{name}:\n{" " * 2 * INDENT}keys:\n{" " * 3 * INDENT}- "{key}"'
    return text[: tenants.start_mark.index].rstrip(" ") + own + text[tenants.end_mark.index :]


def _with_item(text: str, keys: Any, key: str) -> str | None:
    if not isinstance(keys, yaml.SequenceNode):
        return None
    if keys.flow_style:
        return _before_bracket(text, keys, f'"{key}"')
    return _after_line(text, _end(keys), f'{" " * keys.start_mark.column}- "{key}"\n')


def _with_items(text: str, keys: Any, left: Collection[str]) -> str | None:
    """With those of its items alone that are `left`."""
    if not isinstance(keys, yaml.SequenceNode):
        return None
    if keys.flow_style or not left:
        items = ", ".join(text[_start(item) : _end(item)] for item in keys.value if item.value in left)
        separator = "" if keys.flow_style else " "
        start = keys.start_mark.index if keys.flow_style else _end_of_key(text, keys.start_mark.index)
        end = keys.end_mark.index if keys.flow_style else _end(keys)
        return f"{text[:start]}{separator}[{items}]{text[end:]}"
    for item in reversed(keys.value):
        if item.value not in left:
            text = text[: _start_of_line(text, _start(item))] + text[_end_of_line(text, _end(item)) :]
    return text


def _before_bracket(text: str, node: Any, item: str) -> str:
    at = _end(node) - 1
    separator = ", " if node.value else ""
    return text[:at].rstrip() + separator + item + text[at:]


def _after_line(text: str, index: int, line: str) -> str:
    at = _end_of_line(text, index)
    return text[:at] + ("" if text[:at].endswith("\n") else "\n") + line + text[at:]


def _start(node: Any) -> int:
    return int(node.start_mark.index)


def _end(node: Any) -> int:
    """Behind its last character; of what is written in lines YAML says only where the next thing begins."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _end_of_key(text: str, index: int) -> int:
    """Of the mapping's key, colon included, whose value begins at `index`."""
    return text.rindex(":", 0, index) + 1


def _start_of_line(text: str, index: int) -> int:
    return text.rfind("\n", 0, index) + 1


def _end_of_line(text: str, index: int) -> int:
    found = text.find("\n", index)
    return len(text) if found < 0 else found + 1
