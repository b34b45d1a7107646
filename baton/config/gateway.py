"""The settings of a gateway process."""

import ipaddress
import re
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from baton.config.generation_config import GenerationConfig
from baton.errors import ConfigError, InvalidRequest
from baton.messages.bounds import LINK_TIMEOUT_S, DrainTimeout, LinkTimeout, Port
from baton.messages.workers import Routers

OPERATOR_HOST: Final = "127.0.0.1"
ORIGIN: Final = re.compile(r"https?://[a-zA-Z0-9.-]+(:\d{1,5})?|https?://\[[0-9a-fA-F:]+\](:\d{1,5})?")
Timeout: TypeAlias = Annotated[float, Meta(ge=0.01, le=86_400)]
HeldBytes: TypeAlias = Annotated[int, Meta(ge=1024, le=2**50)]


class TextSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings with which a gateway reads and writes the text of one model."""

    chat_template: str | None = None  # a Jinja file on the gateway's machine; None: the model's own template
    # The form of the model's tool calls by vLLM's names, such as hermes; None: the chat template tells it.
    tool_call_parser: str | None = None
    # The form of its reasoning: qwen3, deepseek_r1, openai_gptoss or none; None: the chat template tells it.
    reasoning_parser: str | None = None
    # "auto": sampling defaults of the model's generation_config.json, as in vLLM; "vllm": vLLM's own defaults
    generation_config: Literal["auto", "vllm"] = "auto"
    # Sampling defaults in place of the model's, as in vLLM, such as {"temperature": 0.6}.
    override_generation_config: GenerationConfig | None = None
    # chat_template_kwargs of requests that do not set them, as in vLLM, such as {"enable_thinking": false}.
    default_chat_template_kwargs: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.override_generation_config is not None:
            try:
                self.override_generation_config.sampling()
            except InvalidRequest as error:
                raise ConfigError(f"gateway.override_generation_config: {error}") from None


def text_settings(settings: TextSettings) -> dict[str, Any]:
    """Return the text settings among these settings, by name."""
    return {name: getattr(settings, name) for name in TextSettings.__struct_fields__}


class GatewaySettings(TextSettings, frozen=True, kw_only=True):
    """The settings of all gateways of a cluster: requests, connections, timeouts."""

    strict: bool = False  # refuse unknown keys in request bodies with 400 instead of counting them
    vllm_metric_names: bool = True  # /metrics also serves vLLM's metric names, for dashboards and llm-d
    # Adapters of the first model from the start, name=path each; see engine.enable_lora.
    lora_modules: tuple[str, ...] = ()
    # Open at once; the last tenth is kept for /health, /ping and /metrics.
    max_connections: Annotated[int, Meta(ge=1, le=2**16)] = 4096
    max_body_bytes: Annotated[int, Meta(ge=1024, le=2**30)] = 4 * 2**20  # of one request
    # Kernel send buffer of each client connection.
    send_buffer_bytes: Annotated[int, Meta(ge=4096, le=2**26)] = 128 * 2**10
    header_timeout_s: Timeout = 10.0  # for a client to send a request's headers
    body_timeout_s: Timeout = 30.0  # for a client to send a request's body
    idle_timeout_s: Timeout = 15.0  # a connection may idle between requests; a WebSocket four times as long
    stall_timeout_s: Timeout = 30.0  # a client may read nothing of what is written to it, then it is dropped
    # Choices that one gateway answers at once.
    max_open_requests: Annotated[int, Meta(ge=1, le=2**20)] = 4096
    # Entries that one call may ask for: tokens x n x (logprobs + 1).
    max_answer_entries: Annotated[int, Meta(ge=1, le=2**32)] = 2**22
    max_input_bytes: HeldBytes = 256 * 2**20  # request bodies and prompts in memory, of all calls together
    max_answer_bytes: HeldBytes = 72 * 2**20  # what is kept of answers, and stored responses, of all calls
    # Responses of /v1/responses that a gateway keeps in memory, of each tenant; 0: none are kept.
    max_stored_responses: Annotated[int, Meta(ge=0, le=2**20)] = 1024
    max_stored_response_bytes: HeldBytes = 16 * 2**20  # memory of these, of each tenant
    max_wait_s: Timeout = 30.0  # a request may wait for a worker with room; then it gets 503
    # True: a request for a model that sleeps wakes the model, and waits up to max_wait_s. False: it gets 503.
    wake_on_request: bool = False
    max_begun_wait_s: Timeout = 300.0  # an answer that has begun may wait for a worker in place of a lost one
    ping_interval_s: Timeout = 15.0  # silence in a stream until the gateway sends a keep-alive comment
    # A port of 127.0.0.1 that serves /metrics, /load, /ui, /admin/, /sleep, /wake_up, /is_sleeping and the
    # loading of LoRA adapters without a key; None: there is none. With tenants, the port for clients serves
    # these to an admin's key alone, also on this machine.
    operator_port: Annotated[int, Meta(ge=1, le=65_535)] | None = None
    # Sites such as https://chat.example of which pages may use the API (CORS), as in vLLM; "*" is every site.
    allowed_origins: tuple[str, ...] = ()
    # The URL that OpenTelemetry traces go to by OTLP/HTTP, as http://127.0.0.1:4318; None: there are none.
    otlp_traces_endpoint: str | None = None
    trace_sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0  # of traces that begin here
    trace_slow_s: Timeout | None = None  # a request that takes as long is always traced, as a failed one is
    resume_window_s: Timeout = 600.0  # after an event of a resumable stream, in which it may be resumed there

    def __post_init__(self) -> None:
        super().__post_init__()
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"gateway.allowed_origins: expected sites such as https://chat.example:8443, or *, "
                    f"got {origin!r}"
                )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.match(r"https?://[^/\s]+", endpoint):
            raise ConfigError(
                "gateway.otlp_traces_endpoint: expected a URL such as http://127.0.0.1:4318 of a collector "
                f"that takes OTLP over HTTP, got {endpoint!r}"
            )


class GatewayModel(TextSettings, frozen=True, kw_only=True):
    """A further model that a gateway serves."""

    model: str  # the directory with the tokenizer and the chat template
    expects_prefill: bool | None = None  # as GatewayConfig.expects_prefill, of the workers of this model
    lora_modules: tuple[str, ...] = ()  # as GatewaySettings.lora_modules: adapters of this model


class GatewayConfig(GatewaySettings, frozen=True):
    """The settings of one gateway process."""

    model: str  # the directory with the tokenizer and the chat template
    routers: Routers  # addresses of all routers of the cluster
    served_model_name: str = ""  # as requests name the model; "": the directory's name
    # Further models, by their names in the API. If there is one, requests to the router name their model.
    other_models: dict[str, GatewayModel] = {}
    host: str = "127.0.0.1"  # address to listen on for clients
    port: Port = 8000  # to listen on for clients; 0: any that is free
    shares_port: bool = False  # several gateway processes listen on one port (SO_REUSEPORT)
    # Whether prefill workers are configured: /health proves then that one works. None: once one was seen.
    expects_prefill: bool | None = None
    tenants_file: str | None = None  # tenants and their keys; None: no keys, and loopback only
    drain_timeout_s: DrainTimeout = 30.0  # for running requests after SIGTERM
    # Seconds without a sign of life after which a connection to a router or a worker is dropped.
    link_timeout_s: LinkTimeout = LINK_TIMEOUT_S

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ConfigError("gateway.model: expected a directory, got an empty string")
        if self.operator_port is not None and self.operator_port == self.port:
            raise ConfigError(f"gateway.operator_port: {self.port} is the port for clients; give another")
        check_reach("gateway.host", self.host, self.tenants_file)


def check_reach(key: str, host: str, tenants_file: str | None) -> None:
    """Raise ConfigError, which names `key`, when other machines reach `host` and requests need no keys."""
    if tenants_file is None and not is_loopback(host):
        raise ConfigError(
            f"{key}: {host!r} can be reached from other machines, which needs keys: "
            "give --tenants FILE (`baton keys add NAME` makes the file), or listen on 127.0.0.1"
        )


# Answered without parsing, because every request is checked: see gateway/http/auth.py.
_USUAL_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1"})


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a socket bound to `host`."""
    if host in _USUAL_LOOPBACK:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
