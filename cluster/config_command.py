"""The settings of `baton serve`.

baton config show [--origin] [options of baton serve]   what they come to, and who says so
baton config schema [serve|tenants]                     the JSON schema of a file of them, or of tenants
baton config validate FILE                              whether `baton serve --config FILE` would take it
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import msgspec

from baton.cluster import standard_output
from baton.cluster.command_line import parser_of
from baton.cluster.serve_options import add_options as add_serve_options
from baton.cluster.serve_options import settings
from baton.cluster.settings import Settings
from baton.cluster.variables import variable
from baton.config_tree import leaves
from baton.errors import ConfigError
from baton.gateway.tenants_file import TenantsFile, is_tenants_file, read_tenants
from baton.serve_config import ServeConfig
from baton.setting_comments import described_schema

ACTIONS = ("show", "schema", "validate")
SCHEMAS: Mapping[str, type[msgspec.Struct]] = {"serve": ServeConfig, "tenants": TenantsFile}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> None:
    parser = parser_of(f"config {arguments.action}", __doc__)
    if arguments.action == "schema":
        parser.add_argument("file", nargs="?", choices=SCHEMAS, default="serve")
        described = SCHEMAS[parser.parse(arguments.rest).file]
        schema = msgspec.json.encode(described_schema(described))
        standard_output.write(msgspec.json.format(schema).decode() + "\n")
    elif arguments.action == "validate":
        parser.add_argument("file", type=Path)
        _validate(parser.parse(arguments.rest).file)
    else:
        add_serve_options(parser)
        parser.add_argument("--origin", action="store_true", help="say where each setting comes from")
        _show(parser.parse(arguments.rest))


def _show(arguments: argparse.Namespace) -> None:
    given = settings(arguments)
    if "model" not in given.given:
        raise ConfigError("model: expected one, such as: baton config show tiny")
    config = given.build()
    for key in leaves(ServeConfig):
        value: object = config
        for name in key.split("."):
            value = getattr(value, name)
        line = f"{key}: {msgspec.json.encode(value).decode()}"
        if arguments.origin:
            origin = given.origin(key)
            line = f"{line:<52} # {origin if origin != 'default' else f'default; {variable(key)}'}"
        standard_output.write(line + "\n")


def _validate(file: Path) -> None:
    if is_tenants_file(file):
        standard_output.write(f"{file}: {len(read_tenants(file).tenants)} tenants, all well\n")
        return
    checked = Settings(ServeConfig, flags={}, file=file, environment={})
    if "model" not in checked.given:
        raise ConfigError(f"{file}: model: expected a value, got none")
    checked.build()
    standard_output.write(f"{file}: {len(checked.given)} settings, all well\n")
