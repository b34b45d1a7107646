"""The key that the processes of a cluster share, in its file.

baton cluster-key rotate    put a new key before the old one: processes speak with it and accept both
baton cluster-key retire    drop the old key: a process that has it alone is refused from then on

The file is --cluster-key-file FILE, else what BATON_CLUSTER_KEY_FILE names. Running processes read it again
each second and keep their connections; they speak with a new key after 5 s.
"""

import argparse
import sys
from typing import Final

from baton.cluster.cluster_key import new_key, read_keys, replace_file
from baton.cluster.router_options import add_key_option, key_file
from baton.errors import ConfigError

ACTIONS: Final = ("rotate", "retire")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=ACTIONS)
    add_key_option(parser)


def run(arguments: argparse.Namespace) -> None:
    """ConfigError: the file is missing or wrong, or there is nothing to retire, or it must be done first."""
    path = key_file(arguments.cluster_key_file)
    keys = read_keys(path)
    if arguments.action == "rotate":
        if len(keys) > 1:
            raise ConfigError(f"{path}: two keys are valid already: run `baton cluster-key retire` first")
        replace_file(path, new_key() + b"\n" + keys[0] + b"\n")
        done = "has a new key; the old one is accepted until `baton cluster-key retire`"
    else:
        if len(keys) < 2:
            raise ConfigError(f"{path}: there is one key, and nothing to retire")
        replace_file(path, keys[0] + b"\n")
        done = "has one key; the old one is refused"
    print(f"baton: {path} {done}", file=sys.stderr, flush=True)
