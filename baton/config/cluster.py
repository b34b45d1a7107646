"""The settings of a whole cluster, as `baton serve` starts it, and of one worker process."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from baton.adapters import named_paths
from baton.config.engine import EngineConfig, EngineSettings
from baton.config.gateway import GatewaySettings, TextSettings, check_reach, text_settings
from baton.config.loader import build, merged
from baton.config.planner import PlannerConfig
from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.messages.bounds import (
    DEFAULT_KV_STREAMS,
    LINK_TIMEOUT_S,
    MAX_NODES,
    MAX_ROUTERS,
    MAX_WORKERS,
    STEP_TIMEOUT_S,
    DrainTimeout,
    KvStreams,
    LinkTimeout,
    Name,
    Port,
    StepTimeout,
)
from baton.messages.workers import Routers, WorkerRole

# A draining worker lives for at least this long: it refuses attempts that are under way to it, all processes
# hear that it drains, and its last messages arrive before its connections end.
DRAIN_NOTICE_S: Final = 0.75


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one worker process."""

    role: WorkerRole  # prefill or decode
    name: Name  # such as "decode-0"; a newer process of the same name displaces the older one
    model_name: Name  # the model's name in the API
    engine: EngineConfig
    routers: Routers  # addresses of all routers of the cluster
    host: str = "127.0.0.1"  # address to listen on, for control connections and KV pages
    port: Port = 0  # for control connections; 0: any that is free
    # How KV pages move between workers: auto, shm, cuda_ipc, nccl, nixl, mooncake, gloo, tcp, or
    # package.module:Class.
    transport: str = "auto"
    # Check that KV pages arrive as they were sent. Both workers must turn it off to skip the check.
    kv_digests: bool = True
    # CUDA streams that copy the KV pages of two ranks side by side, over nccl, nixl and mooncake.
    kv_streams: KvStreams = DEFAULT_KV_STREAMS
    drain_timeout_s: DrainTimeout = 30.0  # for running requests when draining
    # Seconds without a sign of life after which a connection to another process is dropped.
    link_timeout_s: LinkTimeout = LINK_TIMEOUT_S
    # Seconds that any step of the model may take before the worker is taken for hung; a step that should
    # take longer may take a multiple of that, see baton/rpc/liveness.py.
    step_timeout_s: StepTimeout = STEP_TIMEOUT_S


MAX_GATEWAYS = 64
MAX_MODEL_NAME_CHARS = 64


class WorkersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workers of one role. Settings that are None have the value of `engine`."""

    num_workers: Annotated[int, Meta(ge=0, le=MAX_WORKERS // 2)] = 1  # workers of this role
    # Ranks of each stage of each worker of this role; None: engine.tensor_parallel_size.
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=1024)] | None = None
    # Pipeline stages of each worker of this role; None: engine.pipeline_parallel_size.
    pipeline_parallel_size: Annotated[int, Meta(ge=1, le=1024)] | None = None
    # Nodes of Ray over which the stages of each worker of this role are spread; None: engine.nnodes.
    nnodes: Annotated[int, Meta(ge=1, le=MAX_NODES)] | None = None
    # Whole experts on each rank of this role; None: engine.enable_expert_parallel.
    enable_expert_parallel: bool | None = None
    page_size: Annotated[int, Meta(ge=1)] | None = None  # tokens in a KV page; None: engine.cache.page_size
    cores_per_rank: Annotated[int, Meta(ge=1, le=1024)] | None = None  # CPU cores; None: an even share
    # Custom Ray resources of each worker on each of its nodes, beside cores and GPUs.
    ray_resources: dict[str, float] = {}

    def engine(self, settings: EngineSettings) -> EngineSettings:
        """Return the engine settings of workers of this role."""
        cache, expert_parallel = settings.cache, self.enable_expert_parallel
        if self.page_size is not None:
            cache = msgspec.structs.replace(cache, page_size=self.page_size)
        if expert_parallel is None:
            expert_parallel = settings.enable_expert_parallel
        return msgspec.structs.replace(
            settings,
            cache=cache,
            tensor_parallel_size=self.tensor_parallel_size or settings.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size or settings.pipeline_parallel_size,
            nnodes=self.nnodes or settings.nnodes,
            enable_expert_parallel=expert_parallel,
        )


class OtherModel(TextSettings, frozen=True, kw_only=True):
    """A further model of a cluster, with its own text settings in place of those of `gateway`."""

    model: str  # as ServeConfig.model
    prefill: WorkersConfig | None = None  # None: the settings of the first model's prefill workers
    decode: WorkersConfig | None = None  # None: the settings of the first model's decode workers
    # Settings of the engine that differ from those of the first model, nested as in `engine`.
    engine: dict[str, Any] = msgspec.field(default_factory=dict)
    lora_modules: tuple[str, ...] = ()  # as in `gateway`: adapters of this model


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a cluster. ConfigError for settings that contradict each other."""

    # a directory, at the same path on every machine, a repository of Hugging Face, or "tiny"
    model: str
    served_model_name: str | None = None  # the model's name in the API; None: the last part of `model`
    # Further models behind the same gateways, by their names in the API. The option --model is given once for
    # each model, the first included: --model a=tiny --model b=/models/b.
    other_models: dict[str, OtherModel] = {}
    runtime: Literal["ray", "local"] = "ray"  # local: processes of this machine, without Ray
    ray_address: str | None = None  # Ray cluster to join; "auto": the one on this machine; None: start one
    host: str = "127.0.0.1"  # address to listen on for clients
    port: Port = 8000  # to listen on for clients; 0: any that is free
    gateways: Annotated[int, Meta(ge=1, le=MAX_GATEWAYS)] = 1  # gateway processes behind the one port
    # Router processes; the others go on when one dies.
    routers: Annotated[int, Meta(ge=1, le=MAX_ROUTERS)] = 1
    prefill: WorkersConfig = WorkersConfig()
    decode: WorkersConfig = WorkersConfig()
    # How KV pages move between workers: auto, shm, cuda_ipc, nccl, nixl, mooncake, gloo, tcp, or
    # package.module:Class.
    transport: str = "auto"
    # Check that KV pages arrive as they were sent. Both workers must turn it off to skip the check.
    kv_digests: bool = True
    # CUDA streams that copy the KV pages of two ranks side by side, over nccl, nixl and mooncake.
    kv_streams: KvStreams = DEFAULT_KV_STREAMS
    tenants: str | None = None  # YAML file of tenants and their keys; None: requests need no key
    cluster_key_file: str | None = None  # the cluster's key; None: BATON_CLUSTER_KEY_FILE, or a new key
    start_timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0  # for workers to load the model
    # Running requests may take this long after SIGTERM, SIGINT or `baton drain`.
    drain_timeout_s: DrainTimeout = 30.0
    # Seconds without a sign of life after which processes drop a connection between them.
    link_timeout_s: LinkTimeout = LINK_TIMEOUT_S
    # Seconds that any step of the model may take before its worker is taken for hung, killed and replaced;
    # a step that should take longer may take a multiple of that.
    step_timeout_s: StepTimeout = STEP_TIMEOUT_S
    router: RouterConfig = RouterConfig()
    gateway: GatewaySettings = GatewaySettings()
    engine: EngineSettings = EngineSettings()
    planner: PlannerConfig = PlannerConfig()

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError('model: expected "tiny", a directory or a repository, got an empty string')
        if self.decode.num_workers < 1:
            raise ConfigError("decode.num_workers: expected 1 or more: every request needs a decode worker")
        if self.ray_address is not None and self.runtime != "ray":
            raise ConfigError(f"ray_address: runtime {self.runtime!r} knows no Ray; leave one of them out")
        check_reach("host", self.host, self.tenants)
        if self.router.link_timeout_s != LINK_TIMEOUT_S:
            raise ConfigError("router.link_timeout_s: set link_timeout_s, which all processes share")
        for pool in self.pools.values():
            settings = pool.engine(self.engine)
            if pool.num_workers:
                settings.check_nodes()
            if settings.nnodes > 1 and self.ray_address is None:
                raise ConfigError(
                    f"nnodes: {settings.nnodes} nodes for a worker need a Ray cluster of several nodes: "
                    "give --ray-address, or leave nnodes out"
                )
        if self.other_models:
            self._check_several()

    def _check_several(self) -> None:
        """Raise ConfigError for wrong names, and for settings that need a cluster of one model."""
        if len(self.model_name) > MAX_MODEL_NAME_CHARS:
            raise ConfigError(
                f"served_model_name: expected up to {MAX_MODEL_NAME_CHARS} characters; workers' names have it"
            )
        for name in self.other_models:
            if not 1 <= len(name) <= MAX_MODEL_NAME_CHARS or name == self.model_name:
                raise ConfigError(
                    "other_models: each model needs a name of its own, of at most "
                    f"{MAX_MODEL_NAME_CHARS} characters, got {name!r}"
                )
        if self.planner.mode != "off":
            raise ConfigError("planner.mode: this needs a cluster of one model; leave other_models out")
        taken: set[str] = set()
        for each in self.models:  # which checks the settings of each model
            for name in (each.model_name, *named_paths(each.gateway.lora_modules)):
                if name in taken:
                    raise ConfigError(f"lora_modules: {name!r} is the name of another model or adapter, too")
                taken.add(name)

    @property
    def models(self) -> "tuple[ServeConfig, ...]":
        """The settings of each model, as if the cluster served that model alone. The first model is first."""
        if not self.other_models:
            return (self,)
        first = msgspec.structs.replace(self, other_models={}, served_model_name=self.model_name)
        return first, *(_of_other(first, name, other) for name, other in self.other_models.items())

    @property
    def pools(self) -> dict[WorkerRole, WorkersConfig]:
        """The workers of each role."""
        return {WorkerRole.PREFILL: self.prefill, WorkerRole.DECODE: self.decode}

    @property
    def num_workers(self) -> int:
        """The number of workers of both roles and all models."""
        return sum(pool.num_workers for each in self.models for pool in each.pools.values())

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all workers."""
        return sum(
            pool.num_workers * pool.engine(each.engine).num_ranks
            for each in self.models
            for pool in each.pools.values()
        )

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or self.model.rstrip("/").rpartition("/")[2] or self.model


def _of_other(first: ServeConfig, name: str, other: OtherModel) -> ServeConfig:
    engine = merged(msgspec.to_builtins(first.engine), other.engine)
    return msgspec.structs.replace(
        first,
        model=other.model,
        served_model_name=name,
        prefill=other.prefill or first.prefill,
        decode=other.decode or first.decode,
        engine=build(EngineSettings, engine, f"other_models.{name}.engine"),
        gateway=msgspec.structs.replace(
            first.gateway, lora_modules=other.lora_modules, **text_settings(other)
        ),
    )
