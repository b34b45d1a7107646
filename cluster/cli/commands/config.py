"""The settings of `baton serve`.

baton config show [--origin] [options of baton serve]   their values, and the origin of each
baton config schema [serve|tenants]                     the JSON schema of a file of settings, or of tenants
baton config validate FILE                              whether `baton serve --config FILE` would take it
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import msgspec

from baton.cluster.cli import output
from baton.cluster.cli.options import CliCommand, Parser
from baton.cluster.cli.settings import Settings, add_serve_options, serve_settings, variable
from baton.config.cluster import ServeConfig
from baton.config.loader import described_schema, leaves
from baton.errors import ConfigError
from baton.gateway.tenants.file import TenantsFile, is_tenants_file, read_tenants

ACTIONS = ("show", "schema", "validate")
SCHEMAS: Mapping[str, type[msgspec.Struct]] = {"serve": ServeConfig, "tenants": TenantsFile}


def _add_options(parser: Parser) -> None:
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _run(arguments: argparse.Namespace) -> None:
    parser = Parser(f"config {arguments.action}", __doc__)
    if arguments.action == "schema":
        parser.add_argument("file", nargs="?", choices=SCHEMAS, default="serve")
        described = SCHEMAS[parser.parse(arguments.rest).file]
        schema = msgspec.json.encode(described_schema(described))
        output.write(msgspec.json.format(schema).decode() + "\n")
    elif arguments.action == "validate":
        parser.add_argument("file", type=Path)
        _validate(parser.parse(arguments.rest).file)
    else:
        add_serve_options(parser)
        parser.add_argument("--origin", action="store_true", help="say where each setting comes from")
        _show(parser.parse(arguments.rest))


def _show(arguments: argparse.Namespace) -> None:
    given = serve_settings(arguments)
    built = given.build()
    for key in leaves(ServeConfig):
        value: object = built
        for name in key.split("."):
            value = getattr(value, name)
        line = f"{key}: {msgspec.json.encode(value).decode()}"
        if arguments.origin:
            origin = given.origin(key)
            line = f"{line:<52} # {origin if origin != 'default' else f'default; {variable(key)}'}"
        output.write(line + "\n")


def _validate(file: Path) -> None:
    if is_tenants_file(file):
        output.write(f"{file}: all well, tenants: {len(read_tenants(file).tenants)}\n")
        return
    checked = Settings(ServeConfig, flags={}, file=file, environment={})
    if "model" not in checked.given:
        raise ConfigError(f"{file}: model: expected a value, got none")
    checked.build()
    output.write(f"{file}: all well, settings: {len(checked.given)}\n")


config = CliCommand(__doc__, _add_options, _run)
