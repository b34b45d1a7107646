"""The key that the processes of a cluster share, in its file.

baton cluster-key new       make the file, with a key
baton cluster-key rotate    put a new key before the old one: processes speak with it and accept both
baton cluster-key retire    drop the old key: a process that has it alone is refused from then on

The file is --cluster-key-file FILE, else what BATON_CLUSTER_KEY_FILE names. Running processes read it again
each second and keep their connections; they speak with a new key after 5 s.
"""

import argparse
import sys
from pathlib import Path
from typing import Final

from baton.cluster.cli.connections import add_key_option, key_file
from baton.cluster.cli.options import CliCommand, Parser
from baton.cluster.cluster_key import new_key, read_keys
from baton.cluster.files import replace_file, write_secret
from baton.errors import ConfigError

ACTIONS: Final = ("new", "rotate", "retire")


def _add_options(parser: Parser) -> None:
    parser.add_argument("action", choices=ACTIONS)
    add_key_option(parser)


def _run(arguments: argparse.Namespace) -> None:
    path = key_file(arguments.cluster_key_file)
    done = {"new": _make, "rotate": _rotate, "retire": _retire}[arguments.action](path)
    print(f"baton: {path} {done}", file=sys.stderr, flush=True)


def _make(path: Path) -> str:
    if path.exists():
        raise ConfigError(f"{path}: the file exists already; `baton cluster-key rotate` changes its key")
    write_secret(path, new_key() + b"\n")
    return "has a key; give the file to every process of the cluster, as --cluster-key-file"


def _rotate(path: Path) -> str:
    keys = read_keys(path)
    if len(keys) > 1:
        raise ConfigError(f"{path}: two keys are valid already: run `baton cluster-key retire` first")
    replace_file(path, new_key() + b"\n" + keys[0] + b"\n")
    return "has a new key; the old one is accepted until `baton cluster-key retire`"


def _retire(path: Path) -> str:
    keys = read_keys(path)
    if len(keys) < 2:
        raise ConfigError(f"{path}: there is one key, and nothing to retire")
    replace_file(path, keys[0] + b"\n")
    return "has one key; the old one is refused"


cluster_key = CliCommand(__doc__, _add_options, _run)
