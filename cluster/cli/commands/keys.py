"""The keys that open the API, in the tenants file.

baton keys add TENANT     make a key, and the tenant if it is new; the key is printed this once.
                          --admin: its keys open /metrics, /ui and the other paths of operators
baton keys revoke ID ...  remove the keys with these ids; TENANT/all: all keys of a tenant
baton keys list           tenants, and the ids of their keys

The file is --tenants FILE, else the one that BATON_TENANTS names, else ./tenants.yaml. It holds SHA-256
digests of keys. A key's id is the first digits of its digest: `printf %s KEY | sha256sum | cut -c-12`. A
running cluster reads a changed file within a second; running requests go on.
"""

import argparse
import contextlib
import fcntl
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from baton.cluster.cli import output
from baton.cluster.cli.options import CliCommand, Parser
from baton.cluster.files import replace_file
from baton.config.environment import environment_settings
from baton.errors import ConfigError, reason_of
from baton.gateway.tenants.file import NAME_FORM, TenantsFile, read_tenants, with_key, without_keys
from baton.gateway.tenants.tenants import key_digest

ACTIONS: Final = ("add", "revoke", "list")
PREFIX: Final = "sk-baton-"
KEY_BYTES: Final = 32
ID_DIGITS: Final = 12
MIN_ID_DIGITS: Final = 8
ALL: Final = "/all"


def _add_options(parser: Parser) -> None:
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _run(arguments: argparse.Namespace) -> None:
    parser = Parser(f"keys {arguments.action}", __doc__)
    default = environment_settings().get("BATON_TENANTS") or "tenants.yaml"
    parser.add_argument("--tenants", type=Path, default=Path(default), metavar="FILE", help="the file")
    if arguments.action == "add":
        parser.add_argument("tenant", metavar="TENANT")
        parser.add_argument(
            "--admin",
            action="store_true",
            help="a new tenant is an admin: its keys open the operators' paths",
        )
        options = parser.parse(arguments.rest)
        _add(options.tenants, options.tenant, options.admin)
    elif arguments.action == "revoke":
        parser.add_argument("ids", metavar="ID", nargs="+")
        options = parser.parse(arguments.rest)
        _revoke(options.tenants, options.ids)
    else:
        _list(parser.parse(arguments.rest).tenants)


def _add(path: Path, tenant: str, admin: bool) -> None:
    if not NAME_FORM.fullmatch(tenant):
        raise ConfigError(f"TENANT: a name matches {NAME_FORM.pattern}, got {tenant!r}")
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    digest = f"sha256:{key_digest(key).hex()}"
    with _locked(path):
        text = with_key(_text(path, may_be_new=True), tenant, digest, admin=admin)
        replace_file(path, text.encode())
    _say(f"{path}: the key {_id(digest)} opens the API for {tenant}; it is shown this once:")
    output.write(key + "\n")


def _revoke(path: Path, ids: list[str]) -> None:
    with _locked(path):
        file = read_tenants(path)
        found = [key for each in ids for key in _keys_of(file, each)]
        replace_file(path, without_keys(_text(path), found).encode())
    left = sum(len(entry.keys) for entry in file.tenants.values()) - len(set(found))
    for key in dict.fromkeys(found):
        _say(f"{path}: the key {_id(key)} opens nothing any more")
    if not left:
        _say("warning: no key is left: every request is refused, and `baton serve` would not start")


def _list(path: Path) -> None:
    file = read_tenants(path)
    rows = []
    for name, entry in file.tenants.items():
        role = "admin" if entry.admin else ""
        for key in entry.keys or ("",):
            rows.append((name, _id(key) or "-", file.classes[file.rank(entry)], f"{entry.weight:g}", role))
    output.show(output.table(("TENANT", "KEY", "CLASS", "WEIGHT", ""), rows))


def _keys_of(file: TenantsFile, wanted: str) -> list[str]:
    """Return the keys that an argument of `revoke` names."""
    if wanted.endswith(ALL):
        tenant = wanted.removesuffix(ALL)
        if tenant not in file.tenants:
            raise ConfigError(f"there is no tenant {tenant!r}; known are {', '.join(file.tenants)}")
        return list(file.tenants[tenant].keys)
    digits = wanted.removeprefix("sha256:").lower()
    every = [key for entry in file.tenants.values() for key in entry.keys]
    found = [key for key in every if key.removeprefix("sha256:").startswith(digits)]
    if len(digits) < MIN_ID_DIGITS:
        raise ConfigError(f"ID: expected {MIN_ID_DIGITS} digits or more of one key, got {wanted!r}")
    if len(found) != 1:
        many = f"{len(found)} keys begin with {digits}" if found else "no key has that id"
        raise ConfigError(f"ID: {many}; `baton keys list` shows the ids")
    return found


def _id(key: str) -> str:
    return key.removeprefix("sha256:")[:ID_DIGITS]


def _text(path: Path, *, may_be_new: bool = False) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if may_be_new:
            return ""
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time change a file of this folder."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{path.resolve().parent}: cannot be opened: {reason_of(error)}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _say(text: str) -> None:
    print(f"baton: {text}", file=sys.stderr, flush=True)


keys = CliCommand(__doc__, _add_options, _run)
