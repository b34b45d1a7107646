"""Settings from the command line, the environment, a file and the defaults, in this order, with origins."""

import argparse
import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from baton.cluster.cli.options import SPELLED, Parser, settings_of
from baton.cluster.logs import add_format_option
from baton.config.cluster import ServeConfig, WorkerConfig
from baton.config.environment import PREFIX, VARIABLES, environment_settings
from baton.config.gateway import GatewayConfig
from baton.config.loader import build, flatten, from_text, known_keys, leaves, nest, unknown_key
from baton.config.router import RouterConfig
from baton.config.yaml_text import load_yaml
from baton.errors import ConfigError, reason_of, shown

MAX_FILE_BYTES: Final = 1 << 20
COMPOSE_VARIABLES: Final = ("BATON_UID", "BATON_GID")  # read by deploy/compose.yaml
# Kubernetes sets these in every container of a service with a name that begins with baton.
KUBERNETES_NAME: Final = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP)(_|$)")
KUBERNETES_VALUE: Final = ("tcp://", "udp://")
# Settings of a gateway and of a router that have an option, of `baton serve` and of the process alone.
GATEWAY_OPTIONS: Final = (
    *("chat_template", "tool_call_parser", "reasoning_parser", "generation_config"),
    *("override_generation_config", "default_chat_template_kwargs", "operator_port", "allowed_origins"),
    *("lora_modules", "wake_on_request", "otlp_traces_endpoint"),
)
ROUTER_OPTIONS: Final = (
    *("policy", "redis", "decision_log", "local_prefill_tokens", "recording_s", "recording_memory_bytes"),
)
# Settings without an option: a file or a variable sets them. An option for each would hide the others.
WITHOUT_OPTION: Final = frozenset(
    {
        "model",
        "prefill.ray_resources",
        "decode.ray_resources",
        "prefill.cores_per_rank",
        "decode.cores_per_rank",
    }
    | {f"router.{name}" for name in leaves(RouterConfig) if name not in ROUTER_OPTIONS}
    | {f"planner.{name}" for name in ("interval_s", "min_prefill", "min_decode", "max_change")}
    | {f"planner.{name}" for name in ("startup_s", "manual_hold_s")}
    | {f"gateway.{name}" for name in leaves(GatewayConfig) if name not in GATEWAY_OPTIONS}
)
NO_MODEL: Final = 'MODEL: expected a directory, a repository or "tiny", got none'

StructT = TypeVar("StructT", bound=msgspec.Struct)


class Given(NamedTuple):
    """A value and its origin in words for the user: a flag, a variable or a key of a file."""

    value: object
    origin: str


class Settings(Generic[StructT]):
    """The values that a user gave for the keys of one struct."""

    def __init__(
        self,
        struct_type: type[StructT],
        *,
        flags: Mapping[str, Given],
        file: Path | None = None,
        environment: Mapping[str, str],
    ) -> None:
        """flags: key -> the value on the command line. Raises ConfigError for a wrong file or variable."""
        self._struct_type = struct_type
        self.given: dict[str, Given] = {
            **(_from_file(struct_type, file) if file else {}),
            **_from_environment(struct_type, environment),
            **flags,
        }

    def build(self) -> StructT:
        """Return the struct. Raises ConfigError, which names the origin of the wrong value."""
        try:
            return build(self._struct_type, nest({key: given.value for key, given in self.given.items()}))
        except ConfigError as error:
            raise ConfigError(self.in_words_of_origin(str(error))) from None

    def origin(self, key: str) -> str:
        """Return the origin of a key's value, or "default"."""
        return self.given[key].origin if key in self.given else "default"

    def in_words_of_origin(self, message: str) -> str:
        """Replace the key at the start of an error message by the origin of the key's value."""
        # The checks of a struct know only the last names: `cache.page_size` of `engine.cache.page_size`.
        key, colon, rest = message.partition(":")
        for known, given in self.given.items():
            if known == key or known.endswith(f".{key}"):
                return f"{given.origin}{colon}{rest}"
        return message


def settings_from(struct_type: type[StructT], arguments: argparse.Namespace) -> Settings[StructT]:
    """Read the options, the environment and the file of --config. Raises ConfigError."""
    spelled, known = getattr(arguments, SPELLED, {}), leaves(struct_type)
    flags = {
        key: Given(value, spelled.get(key, key)) for key, value in vars(arguments).items() if key in known
    }
    return Settings(struct_type, flags=flags, file=arguments.config, environment=environment_settings())


def serve_settings(arguments: argparse.Namespace) -> Settings[ServeConfig]:
    """Read the settings of a cluster, as `settings_from` does. Raises ConfigError without a model, too."""
    settings = settings_from(ServeConfig, arguments)
    if "model" not in settings.given:
        raise ConfigError(NO_MODEL)
    return settings


def add_file_options(parser: Parser) -> None:
    """Add --config and --log-format."""
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="settings as YAML; options have precedence"
    )
    add_format_option(parser)


def add_serve_options(parser: Parser) -> None:
    """Add the options of `baton serve`, which `baton config` and `baton doctor` take too."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs=argparse.OPTIONAL,
        help='a directory, the same on every machine, a repository (ORGANIZATION/NAME[@REVISION]), or "tiny"',
        default=argparse.SUPPRESS,
    )
    add_file_options(parser)
    shown = {key: each for key, each in settings_of(ServeConfig).items() if key not in WITHOUT_OPTION}
    parser.add_settings("cluster", [shown[key] for key in shown if not key.startswith("engine.")])
    parser.add_settings("engine (of all workers)", [shown[key] for key in shown if key.startswith("engine.")])


def variable(key: str) -> str:
    """Return the variable of a setting: BATON_ENGINE_CACHE_PAGE_SIZE for engine.cache.page_size."""
    return PREFIX + key.upper().replace(".", "_")


def check_variables(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for an unknown variable with a name like a known one.

    Variables of all commands are known, since a variable may be meant for another command.
    """
    structs = (ServeConfig, WorkerConfig, GatewayConfig, RouterConfig)
    known = [variable(key) for struct in structs for key in leaves(struct)]
    known += [*VARIABLES, *COMPOSE_VARIABLES]
    for name, value in environment.items():
        if name in known or KUBERNETES_NAME.search(name) or value.startswith(KUBERNETES_VALUE):
            continue
        nearest = _nearest(name, known)
        if nearest is not None:
            raise ConfigError(f"unknown variable {name}; did you mean {nearest}?")


def _nearest(name: str, known: list[str]) -> str | None:
    """Return the known name nearest to `name`. Names are compared without PREFIX.

    A name that is the beginning or end of known names matches the first of them.
    """
    stem = name.removeprefix(PREFIX)
    stems = [other.removeprefix(PREFIX) for other in known]
    parts = [other for other in stems if other.startswith(f"{stem}_") or other.endswith(f"_{stem}")]
    alike = parts or difflib.get_close_matches(stem, stems, n=1)
    return PREFIX + alike[0] if alike else None


def _from_environment(struct_type: type[msgspec.Struct], environment: Mapping[str, str]) -> dict[str, Given]:
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


def _from_file(struct_type: type[msgspec.Struct], file: Path) -> dict[str, Given]:
    known, every = leaves(struct_type), known_keys(struct_type)
    given = {}
    for key, value in flatten(read_mapping(file), known).items():
        if key not in every:
            raise ConfigError(f"{file}: {unknown_key(key, every)}")
        if key not in known:
            raise ConfigError(f"{file}: {key}: expected a mapping, got {shown(value)}")
        given[key] = Given(value, f"{file}: {key}")
    return given


def read_mapping(file: Path) -> Mapping[str, object]:
    """Read a YAML or JSON file. Raises ConfigError unless the file holds a mapping with names for keys."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{file}: expected {MAX_FILE_BYTES:,} bytes at most")
        read = load_yaml(content.decode()) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {reason_of(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(read, dict) or not all(isinstance(key, str) for key in read):
        raise ConfigError(f"{file}: expected settings such as 'model: tiny', got {type(read).__name__}")
    return read
