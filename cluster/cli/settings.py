"""Settings from the command line, the environment, a file and the defaults, in this order, with origins."""

import argparse
import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec
import yaml

from baton.cluster.cli.options import SPELLED
from baton.config.cluster import ServeConfig, WorkerConfig
from baton.config.environment import PREFIX, VARIABLES
from baton.config.gateway import GatewayConfig
from baton.config.loader import build, flatten, from_text, known_keys, leaves, nest, unknown_key
from baton.config.router import RouterConfig
from baton.errors import ConfigError

# Variables of the environment that set something, and those that were meant to.
#
# The environment's name of `engine.cache.page_size` is BATON_ENGINE_CACHE_PAGE_SIZE.

OF_COMPOSE: Final = ("BATON_UID", "BATON_GID")  # read by deploy/compose.yaml
# What Kubernetes tells every container of a service whose name begins with baton.
OF_KUBERNETES: Final = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP)(_|$)")
OF_KUBERNETES_VALUE: Final = ("tcp://", "udp://")


def variable(key: str) -> str:
    return PREFIX + key.upper().replace(".", "_")


def check_variables(environment: Mapping[str, str]) -> None:
    """ConfigError for a variable that sets nothing and is named nearly as one that does.

    One may stand there for another command than the one that looks.
    """
    structs = (ServeConfig, WorkerConfig, GatewayConfig, RouterConfig)
    known = [variable(key) for struct in structs for key in leaves(struct)] + [*VARIABLES, *OF_COMPOSE]
    for name, value in environment.items():
        if name in known or OF_KUBERNETES.search(name) or value.startswith(OF_KUBERNETES_VALUE):
            continue
        nearest = _nearest(name, known)
        if nearest is not None:
            raise ConfigError(f"unknown variable {name}; did you mean {nearest}?")


def _nearest(name: str, known: list[str]) -> str | None:
    """By what follows the prefix, which would make any two look alike. A part of a name means its first."""
    stem = name.removeprefix(PREFIX)
    stems = [other.removeprefix(PREFIX) for other in known]
    parts = [other for other in stems if other.startswith(f"{stem}_") or other.endswith(f"_{stem}")]
    alike = parts or difflib.get_close_matches(stem, stems, n=1)
    return PREFIX + alike[0] if alike else None


StructT = TypeVar("StructT", bound=msgspec.Struct)
MAX_FILE_BYTES: Final = 1 << 20


class Given(NamedTuple):
    """One setting, and who gave it, as it is told to the user: a flag, a variable or a file's key."""

    value: object
    origin: str


class Settings(Generic[StructT]):
    def __init__(
        self,
        struct_type: type[StructT],
        *,
        flags: Mapping[str, Given],
        file: Path | None = None,
        environment: Mapping[str, str],
    ) -> None:
        """flags: key -> what the command line says. ConfigError for what is wrong in the file."""
        self._struct_type = struct_type
        self.given: dict[str, Given] = {
            **(_of_file(struct_type, file) if file else {}),
            **_of_environment(struct_type, environment),
            **flags,
        }

    def build(self) -> StructT:
        """ConfigError names whoever gave the value that is wrong."""
        try:
            return build(self._struct_type, nest({key: given.value for key, given in self.given.items()}))
        except ConfigError as error:
            raise ConfigError(self.in_words_of_origin(str(error))) from None

    def origin(self, key: str) -> str:
        given = self.given.get(key)
        return given.origin if given else "default"

    def in_words_of_origin(self, message: str) -> str:
        """What is wrong with a setting, told with whoever gave it."""
        # A struct's own checks know its last names alone: `cache.page_size` of `engine.cache.page_size`.
        key, colon, rest = message.partition(":")
        for known, given in self.given.items():
            if known == key or known.endswith(f".{key}"):
                return f"{given.origin}{colon}{rest}"
        return message


def flags_given(struct_type: type[msgspec.Struct], arguments: argparse.Namespace) -> dict[str, Given]:
    """What the command line says of the struct's keys; other options are left out."""
    spelled, known = getattr(arguments, SPELLED, {}), leaves(struct_type)
    return {
        key: Given(value, spelled.get(key, key)) for key, value in vars(arguments).items() if key in known
    }


def _of_environment(struct_type: type[msgspec.Struct], environment: Mapping[str, str]) -> dict[str, Given]:
    given = {}
    check_variables(environment)
    for key, field in leaves(struct_type).items():
        name = variable(key)
        if name in environment:
            try:
                given[key] = Given(from_text(field, environment[name], key), name)
            except ConfigError as error:
                raise ConfigError(str(error).replace(key, name, 1)) from None
    return given


def _of_file(struct_type: type[msgspec.Struct], file: Path) -> dict[str, Given]:
    known = leaves(struct_type)
    given = {}
    for key, value in flatten(read_mapping(file), known).items():
        if key not in known:
            raise ConfigError(f"{file}: {unknown_key(key, known_keys(struct_type))}")
        given[key] = Given(value, f"{file}: {key}")
    return given


def read_mapping(file: Path) -> Mapping[str, object]:
    """What a YAML or JSON file holds; ConfigError unless it is a mapping with names for keys."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{file}: expected {MAX_FILE_BYTES:,} bytes at most")
        read = yaml.safe_load(content.decode()) or {}
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(read, dict) or not all(isinstance(key, str) for key in read):
        raise ConfigError(f"{file}: expected settings such as 'model: tiny', got {type(read).__name__}")
    return read
