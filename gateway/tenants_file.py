"""The tenants file: whose keys open the API, and what each tenant may ask for.

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

Every field is in `baton.tenancy.TenantPolicy`, beside `keys` and `admin`. `printf %s KEY | sha256sum` prints
the digits of a key; `baton keys` writes them. Nothing is taken of a file that is wrong anywhere.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import yaml
from msgspec import Meta

from baton.config_tree import build, unknown_key
from baton.errors import ConfigError
from baton.tenancy import MAX_CLASSES, ONLY_CLASS, ClassName, TenantName, TenantPolicy

KEY_FORM: Final = re.compile(r"sha256:([0-9a-f]{64})")
NAME_FORM: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_FILE_BYTES: Final = 16 * 2**20
MAX_VALUES: Final = 2**22  # that a file spells out, of all it names by an alias again and again

KeyDigest: TypeAlias = Annotated[str, Meta(pattern=f"^{KEY_FORM.pattern}$")]


class Entry(TenantPolicy, frozen=True, kw_only=True):
    """One tenant's part of the file."""

    keys: tuple[KeyDigest, ...]  # SHA-256 digests of the keys that clients send
    admin: bool = False  # its keys open the operator endpoints

    @property
    def digests(self) -> list[bytes]:
        return [bytes.fromhex(key.removeprefix("sha256:")) for key in self.keys]


class TenantsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file says, checked as a whole."""

    # Priority classes, highest first; a class is served strictly before the next.
    classes: Annotated[tuple[ClassName, ...], Meta(min_length=1, max_length=MAX_CLASSES)] = (ONLY_CLASS,)
    public_prefixes: dict[TenantName, str] = {}  # prompt prefixes by name, which tenants may share
    tenants: dict[TenantName, Entry]  # by name

    def rank(self, entry: Entry) -> int:
        """0 for those who are served first."""
        if entry.priority_class is None:
            return len(self.classes) - 1
        return self.classes.index(entry.priority_class)


def is_tenants_file(path: Path) -> bool:
    """Whether a file describes tenants, right or wrong. A file of settings names a tenants file instead."""
    try:
        content = load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError):
        return False
    return isinstance(content, dict) and isinstance(content.get("tenants"), dict)


def read_tenants(path: Path) -> TenantsFile:
    """Raises ConfigError, which names the file and the key, on anything that is not as above."""
    try:
        if not path.is_file() and path.exists():  # a pipe would hold up its reader, a device has no end
            raise ConfigError(f"{path}: expected a plain file")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode()
    except FileNotFoundError as error:
        made = "`baton keys add TENANT` makes it"
        raise ConfigError(f"{path}: cannot be read: there is no such file; {made}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: expected at most {MAX_FILE_BYTES} bytes")
    return parse_tenants(text, str(path))


def parse_tenants(text: str, name: str) -> TenantsFile:
    """As `read_tenants`; `name`: of the file, for messages."""
    try:
        content = load(text)
        return _file(content)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def load(text: str) -> Any:
    """What YAML says, plain values; ConfigError where it is none, or a mapping has one key twice."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            _check_size(root)
            return loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:  # without its excerpt of the file, where there may be a key
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"cannot be read: {where}{error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}") from None
    except (AttributeError, LookupError, TypeError):  # of PyYAML, and it may have a key's text
        raise ConfigError("cannot be read: a tag does not go with its value") from None


def _check_size(root: yaml.Node) -> None:
    """ConfigError where aliases make a small file stand for a huge one, or one without an end."""
    num_values: dict[int, int] = {}  # of each node with all that is in it; 0 while it is being counted

    def count(node: yaml.Node) -> int:
        known = num_values.get(id(node))
        if known == 0:
            raise ConfigError(f"line {node.start_mark.line + 1}: what the anchor names is in itself")
        if known is not None:
            return known
        num_values[id(node)] = 0
        num_values[id(node)] = found = 1 + sum(map(count, _inside(node)))
        if found > MAX_VALUES:
            raise ConfigError(f"expected at most {MAX_VALUES} values, aliases spell out more")
        return found

    count(root)


def _inside(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return (each for pair in node.value for each in pair)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set[tuple[str, str]]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                problem = f"the key {str(key.value)[:64]!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep=deep)


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
        raise ConfigError("classes: a name stands twice")
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


def _entry(name: str, given: object) -> Entry:
    where = f"tenants.{name}"
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: expected a mapping, got {type(given).__name__}")
    if "keys" in given:
        given = given | {"keys": _keys(f"{where}.keys", given["keys"])}
    return build(Entry, given, where)


def _keys(where: str, given: object) -> tuple[str, ...]:
    """Whatever stands there may be a key itself: it is not shown."""
    if not isinstance(given, list):
        raise ConfigError(f"{where}: expected a list, got {type(given).__name__}")
    for index, key in enumerate(given):
        if not isinstance(key, str) or not KEY_FORM.fullmatch(key):
            raise ConfigError(f"{where}[{index}]: expected 'sha256:' and 64 hexadecimal digits")
    return tuple(given)


def _check_known(where: str, name: str, known: Iterable[str], what: str) -> None:
    names = list(known)
    if name in names:
        return
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(names) or 'none'}"
    raise ConfigError(f"{where}: there is no {what} {name!r}; {hint}")


def _check_keys_are_distinct(entries: Mapping[str, Entry]) -> None:
    owners: dict[str, str] = {}
    for name, entry in entries.items():
        for key in entry.keys:
            if key in owners:
                whose = (
                    "twice" if owners[key] == name else f"also of tenant {owners[key]!r}: it belongs to two"
                )
                raise ConfigError(f"tenants.{name}.keys: {key[:15]}... is there {whose}")
            owners[key] = name
