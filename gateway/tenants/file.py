"""The tenants file: the keys that open the API, and the policy of each tenant.

    classes: [interactive, batch]      # the first is served strictly before the second; left out: one class
    public_prefixes:
      house: "You are a helpful assistant."
    tenants:
      acme:
        keys: ["sha256:f64e871c..."]   # of the key that clients send, in hexadecimal
        weight: 2
        priority_class: interactive
        sla: {ttft_ms: 500, tpot_ms: 50}
        quotas: {tokens_per_s: 5000, max_concurrent_requests: 64}
        models: [tiny]                 # left out: every model
        public_prefixes: [house]
        admin: true                    # left out: its keys do not open /metrics and /load

`baton.tenants.TenantPolicy` has every field beside `keys` and `admin`. `printf %s KEY | sha256sum` prints the
digits of a key; `baton keys` writes them. A file with any fault is refused as a whole.

`with_key` and `without_keys` change the keys of a file and leave the rest as its author wrote it. They change
the text where YAML says that keys stand, and read the result again: unless it is the same file but for the
keys, it is not used.
"""

import math
import re
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import yaml
from msgspec import Meta

from baton.config.loader import build, unknown_key
from baton.config.yaml_text import load_yaml
from baton.errors import ConfigError, nearest_hint, reason_of
from baton.tenants import MAX_CLASSES, ONLY_CLASS, ClassName, TenantName, TenantPolicy

KEY_FORM: Final = re.compile(r"sha256:([0-9a-f]{64})")
NAME_FORM: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_FILE_BYTES: Final = 16 * 2**20
KeyDigest: TypeAlias = Annotated[str, Meta(pattern=f"^{KEY_FORM.pattern}$")]


class TenantEntry(TenantPolicy, frozen=True, kw_only=True):
    """One tenant's part of the file."""

    keys: tuple[KeyDigest, ...]  # SHA-256 digests of the keys that clients send
    admin: bool = False  # its keys open the operator endpoints

    @property
    def digests(self) -> list[bytes]:
        """The digests of the keys."""
        return [bytes.fromhex(key.removeprefix("sha256:")) for key in self.keys]


class TenantsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a file, checked as a whole."""

    # Priority classes, highest first; a class is served strictly before the next.
    classes: Annotated[tuple[ClassName, ...], Meta(min_length=1, max_length=MAX_CLASSES)] = (ONLY_CLASS,)
    public_prefixes: dict[TenantName, str] = {}  # prompt prefixes by name, which tenants may share
    tenants: dict[TenantName, TenantEntry]  # by name

    def rank(self, entry: TenantEntry) -> int:
        """Return the rank of a tenant's class; 0 is served first."""
        if entry.priority_class is None:
            return len(self.classes) - 1
        return self.classes.index(entry.priority_class)


def is_tenants_file(path: Path) -> bool:
    """Return whether a file is a tenants file, valid or not, and no file of settings."""
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError):
        return False
    return isinstance(content, dict) and isinstance(content.get("tenants"), dict)


def read_tenants(path: Path) -> TenantsFile:
    """Read a tenants file. Raises ConfigError that names the file and the wrong key."""
    try:
        if not path.is_file() and path.exists():  # reading a pipe may block, and a device has no end
            raise ConfigError(f"{path}: expected a plain file")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode()
    except FileNotFoundError as error:
        made = "`baton keys add TENANT` makes it"
        raise ConfigError(f"{path}: cannot be read: there is no such file; {made}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: expected at most {MAX_FILE_BYTES} bytes")
    return parse_tenants(text, str(path))


def parse_tenants(text: str, name: str) -> TenantsFile:
    """Read the text of a tenants file. name: the file, for messages. Raises ConfigError."""
    try:
        content = load_yaml(text)
        return _file(content)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _file(content: object) -> TenantsFile:
    if not isinstance(content, dict):
        raise ConfigError(f"expected a mapping with the key 'tenants', got {type(content).__name__}")
    for key in content:
        if key not in TenantsFile.__struct_fields__:
            raise ConfigError(unknown_key(str(key), list(TenantsFile.__struct_fields__)))
    classes = _classes(content.get("classes", [ONLY_CLASS]))
    prefixes = _prefixes(content.get("public_prefixes", {}))
    tenants = content.get("tenants")
    if not isinstance(tenants, dict):
        raise ConfigError(f"tenants: expected a mapping, got {type(tenants).__name__}")
    entries = {_name("tenants", name): _entry(name, entry) for name, entry in tenants.items()}
    for name, entry in entries.items():
        if entry.priority_class is not None:
            _check_known(f"tenants.{name}.priority_class", entry.priority_class, classes, "class")
        for prefix in entry.public_prefixes:
            _check_known(f"tenants.{name}.public_prefixes", prefix, prefixes, "public prefix")
    _check_keys_are_distinct(entries)
    return TenantsFile(classes=classes, public_prefixes=prefixes, tenants=entries)


def _classes(given: object) -> tuple[str, ...]:
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_CLASSES:
        raise ConfigError(f"classes: expected a list of 1 to {MAX_CLASSES} names, the first served first")
    names = tuple(_name("classes", name) for name in given)
    if len(set(names)) < len(names):
        raise ConfigError("classes: a name is repeated")
    return names


def _prefixes(given: object) -> dict[str, str]:
    if not isinstance(given, dict):
        raise ConfigError(f"public_prefixes: expected a mapping, got {type(given).__name__}")
    for name, text in given.items():
        _name("public_prefixes", name)
        if not isinstance(text, str) or not text:
            raise ConfigError(f"public_prefixes.{name}: expected the text that prompts begin with")
    return dict(given)


def _name(where: str, name: object) -> str:
    if not isinstance(name, str) or not NAME_FORM.fullmatch(name):
        raise ConfigError(f"{where}: a name matches {NAME_FORM.pattern}, got {str(name)[:64]!r}")
    return name


def _entry(name: str, given: object) -> TenantEntry:
    where = f"tenants.{name}"
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: expected a mapping, got {type(given).__name__}")
    if "keys" in given:
        given = given | {"keys": _keys(f"{where}.keys", given["keys"])}
    return build(TenantEntry, given, where)


def _keys(where: str, given: object) -> tuple[str, ...]:
    """Check key digests; a wrong one may be a key itself, so it is not shown."""
    if not isinstance(given, list):
        raise ConfigError(f"{where}: expected a list, got {type(given).__name__}")
    for index, key in enumerate(given):
        if not isinstance(key, str) or not KEY_FORM.fullmatch(key):
            raise ConfigError(
                f"{where}[{index}]: expected 'sha256:' and 64 hexadecimal digits, which `printf %s KEY | "
                "sha256sum` prints"
            )
    return tuple(given)


def _check_known(where: str, name: str, known: Collection[str], what: str) -> None:
    if name not in known:
        raise ConfigError(f"{where}: {unknown_name(what, name, known)}")


def unknown_name(what: str, name: str, known: Collection[str]) -> str:
    """Return the error message for a name that is not among the known ones."""
    hint = nearest_hint(name, known) or f"; known are {', '.join(known) or 'none'}"
    return f"there is no {what} {name!r}{hint}"


def _check_keys_are_distinct(entries: Mapping[str, TenantEntry]) -> None:
    owners: dict[str, str] = {}
    for name, entry in entries.items():
        for key in entry.keys:
            if key in owners:
                other = "listed twice" if owners[key] == name else f"also a key of tenant {owners[key]!r}"
                raise ConfigError(f"tenants.{name}.keys: {key[:15]}... is {other}")
            owners[key] = name


FRESH: Final = "tenants: {}\n"
INDENT: Final = 2


def with_key(text: str, tenant: str, key: str, *, admin: bool = False) -> str:
    """Return the file with one more key, "sha256:" and its digits; the tenant is added if need be.

    admin: of a tenant that is added; a tenant that is there must be an admin already.
    Raises ConfigError for a wrong file, and for a file that must be changed by hand.
    """
    text = text if text.strip() else FRESH
    file = parse_tenants(text, "the file")
    entry = file.tenants.get(tenant, TenantEntry(keys=(), admin=admin))
    if admin and not entry.admin:
        raise ConfigError(f"tenants.{tenant} is no admin: write `admin: true` there, and add the key then")
    entry = msgspec.structs.replace(entry, keys=(*entry.keys, key))
    expected = msgspec.structs.replace(file, tenants=file.tenants | {tenant: entry})
    root = yaml.compose(text, yaml.SafeLoader)
    if tenant in file.tenants:
        keys = _value(_value(_value(root, "tenants"), tenant), "keys")
        changed = _with_item(text, keys, key)
    else:
        changed = _with_tenant(text, root, tenant, {"keys": [key]} | ({"admin": True} if admin else {}))
    return _checked(changed, expected, f"add {key} to tenants.{tenant}.keys")


def without_keys(text: str, keys: Collection[str]) -> str:
    """Return the file without these keys. Raises ConfigError as above."""
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
    """Return the node of a mapping's value, or None."""
    if isinstance(mapping, yaml.MappingNode):
        for key, value in mapping.value:
            if key.value == name:
                return value
    return None


def _with_tenant(text: str, root: Any, name: str, entry: Mapping[str, object]) -> str:
    tenants = _value(root, "tenants")
    is_block = not tenants.flow_style or not (tenants.value or root.flow_style)
    added = yaml.safe_dump(
        {name: entry}, default_flow_style=not is_block, indent=INDENT, sort_keys=False, width=math.inf
    )
    if not is_block:
        return _before_bracket(text, tenants, added.strip()[1:-1])
    if tenants.flow_style:
        own = "\n" + textwrap.indent(added, " " * INDENT).rstrip()
        return text[: tenants.start_mark.index].rstrip(" ") + own + text[tenants.end_mark.index :]
    column = tenants.value[0][0].start_mark.column
    return _after_line(text, _end(tenants), textwrap.indent(added, " " * column))


def _with_item(text: str, keys: Any, key: str) -> str | None:
    if not isinstance(keys, yaml.SequenceNode):
        return None
    if keys.flow_style:
        return _before_bracket(text, keys, f'"{key}"')
    return _after_line(text, _end(keys), f"{' ' * keys.start_mark.column}- {key}\n")


def _with_items(text: str, keys: Any, left: Collection[str]) -> str | None:
    """Return the text with only the items that are `left`."""
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
    """Return the end of a node; PyYAML ends a block only where the next node begins."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _end_of_key(text: str, index: int) -> int:
    """Return the end of the key, colon included, of the value that begins at `index`."""
    return text.rindex(":", 0, index) + 1


def _start_of_line(text: str, index: int) -> int:
    return text.rfind("\n", 0, index) + 1


def _end_of_line(text: str, index: int) -> int:
    found = text.find("\n", index)
    return len(text) if found < 0 else found + 1
