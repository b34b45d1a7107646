"""The plan of a cluster: its processes and the configuration of each. Pure decisions."""

import itertools
import math
from collections.abc import Collection
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from baton.adapters import named_paths, read_adapter
from baton.cluster.model_directory import resolve_draft_model, resolve_model
from baton.cluster.runtimes.base import ProcessSpec
from baton.config.cluster import ServeConfig, WorkerConfig
from baton.config.engine import EngineConfig, EngineSettings
from baton.config.gateway import GatewayConfig, GatewayModel, TextSettings, text_settings
from baton.engine.models.loading.checkpoint import read_entries
from baton.engine.models.registry import (
    RANK_CHECKS,
    check_supported,
    choose_max_model_len,
    read_draft_model_config,
    read_model_config,
)
from baton.errors import ConfigError
from baton.gateway.tenants.tenants import Tenants
from baton.gateway.text.answer_parsing import ModelParsers
from baton.gateway.text.chat_template import ChatTemplate
from baton.messages.bounds import Kind
from baton.messages.workers import Routers, WorkerRole
from baton.router.policies.registry import policy_class
from baton.tokenizer_file import has_tokenizer

# CUDA's MPS serves decode before prefill on a GPU that both share; see mps_variables.
MPS_PRIORITIES: Final[dict[WorkerRole, int]] = {WorkerRole.DECODE: 0, WorkerRole.PREFILL: 1}


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses and GPUs of a cluster."""

    routers: Routers  # addresses that the routers will listen on
    host: str  # address that workers listen on; "": that of the machine of each
    port: int  # of the API
    redis: str = "none"  # URL of the Redis that routers share
    num_gpus: int  # for all workers together


def specs(config: ServeConfig, topology: Topology) -> list[ProcessSpec]:
    """Return the processes of the cluster: workers, which start slowest, then routers, then gateways."""
    gpus_per_rank = _gpus_per_rank(config, topology.num_gpus)
    workers = [
        _worker(model, topology, role, worker_name(config, model, role, index), gpus_per_rank)
        for model in config.models
        for role, pool in model.pools.items()
        for index in range(pool.num_workers)
    ]
    routers = [_router(config, topology, index) for index in range(len(topology.routers))]
    return [*workers, *routers, *(_gateway(config, topology, i) for i in range(config.gateways))]


def more_workers(
    config: ServeConfig,
    model: ServeConfig,
    topology: Topology,
    role: WorkerRole,
    num_more: int,
    names: Collection[str],
) -> list[ProcessSpec]:
    """Return further workers of a role, as `specs` plans them.

    model: of `config.models`. names: of the present processes.
    """
    gpus_per_rank = _gpus_per_rank(config, topology.num_gpus)
    every = (worker_name(config, model, role, index) for index in itertools.count())
    free = itertools.islice((name for name in every if name not in names), num_more)
    return [_worker(model, topology, role, name, gpus_per_rank) for name in free]


def worker_name(config: ServeConfig, model: ServeConfig, role: WorkerRole, index: int) -> str:
    """Return the name of a worker, such as decode-0. Of several models, it begins with the model's name."""
    return f"{model.model_name}-{role}-{index}" if config.other_models else f"{role}-{index}"


def router_ports(config: ServeConfig) -> list[int]:
    """Return consecutive ports, one for each router; 0s when the first port is 0 (any free port)."""
    first = config.router.port
    return [first + index if first else 0 for index in range(config.routers)]


def _gpus_per_rank(config: ServeConfig, num_gpus: int) -> float:
    """Return the share of a GPU for each rank: 0 on CPUs, below 1 when ranks must share GPUs."""
    if config.engine.device == "cpu" or (config.engine.device == "auto" and not num_gpus):
        return 0.0
    if config.num_ranks <= num_gpus or not num_gpus:  # without any, GPUs of later nodes of Ray
        return 1.0
    return 1 / math.ceil(config.num_ranks / num_gpus)


def _worker(
    config: ServeConfig, topology: Topology, role: WorkerRole, name: str, gpus_per_rank: float
) -> ProcessSpec:
    pool = config.pools[role]
    shares_gpu = 0 < gpus_per_rank < 1
    settings = pool.engine(config.engine)
    if settings.device == "auto":  # a worker that misses its GPU fails, and one on a CPU takes no GPU
        settings = msgspec.structs.replace(settings, device="cuda" if gpus_per_rank else "cpu")
    if shares_gpu:
        settings = _share_of_gpu(settings, gpus_per_rank, role)
    return ProcessSpec(
        kind=Kind.WORKER,
        name=name,
        role=role,
        num_ranks=settings.num_ranks,
        num_nodes=settings.nnodes,
        cores_per_rank=pool.cores_per_rank,
        gpus_per_rank=gpus_per_rank,
        mps_priority=MPS_PRIORITIES[role] if shares_gpu else None,
        resources=pool.ray_resources,
        config=WorkerConfig(
            role=role,
            name=name,
            model_name=config.model_name,
            engine=EngineConfig(model=config.model, **msgspec.structs.asdict(settings)),
            routers=topology.routers,
            host=topology.host,
            transport=config.transport,
            kv_digests=config.kv_digests,
            kv_streams=config.kv_streams,
            drain_timeout_s=config.drain_timeout_s,
            link_timeout_s=config.link_timeout_s,
            step_timeout_s=config.step_timeout_s,
        ),
    )


def with_role(spec: ProcessSpec, role: WorkerRole) -> ProcessSpec:
    """Return the worker with another role, in which its next process begins."""
    assert isinstance(spec.config, WorkerConfig)
    return msgspec.structs.replace(spec, role=role, config=msgspec.structs.replace(spec.config, role=role))


def _share_of_gpu(settings: EngineSettings, gpus_per_rank: float, role: WorkerRole) -> EngineSettings:
    """Divide `gpu_memory_utilization`, a share of the whole GPU, among its ranks; decode goes first.

    A decode step is short and every running answer waits for it; the steps of a prompt are long.
    """
    share = settings.cache.gpu_memory_utilization * gpus_per_rank
    cache = msgspec.structs.replace(settings.cache, gpu_memory_utilization=share)
    priority = settings.stream_priority
    if role is WorkerRole.DECODE:
        priority = min(priority, -1)
    return msgspec.structs.replace(settings, cache=cache, stream_priority=priority)


def _router(config: ServeConfig, topology: Topology, index: int) -> ProcessSpec:
    address = topology.routers[index]
    settings = msgspec.structs.replace(
        config.router,
        host=address.host,
        port=address.port,
        redis=topology.redis,
        seed=config.router.seed ^ index,  # a different seed for each router
        link_timeout_s=config.link_timeout_s,
    )
    return ProcessSpec(kind=Kind.ROUTER, name=f"router-{index}", config=settings)


def _gateway(config: ServeConfig, topology: Topology, index: int) -> ProcessSpec:
    return ProcessSpec(
        kind=Kind.GATEWAY,
        name=f"gateway-{index}",
        config=GatewayConfig(
            model=config.model,
            served_model_name=config.model_name,
            other_models={each.model_name: _gateway_model(each) for each in config.models[1:]},
            routers=topology.routers,
            host=config.host,
            port=topology.port,
            shares_port=True,
            expects_prefill=config.prefill.num_workers > 0,
            tenants_file=config.tenants,
            drain_timeout_s=config.drain_timeout_s,
            link_timeout_s=config.link_timeout_s,
            **{**msgspec.structs.asdict(config.gateway), "lora_modules": _lora_modules(config)},
        ),
    )


def _gateway_model(config: ServeConfig) -> GatewayModel:
    return GatewayModel(
        model=config.model,
        expects_prefill=config.prefill.num_workers > 0,
        lora_modules=_lora_modules(config),
        **text_settings(config.gateway),
    )


def _lora_modules(config: ServeConfig) -> tuple[str, ...]:
    """Return the adapters of a model with whole paths: the gateway may start in another folder."""
    return tuple(f"{name}={path}" for name, path in named_paths(config.gateway.lora_modules).items())


# Checks before any process starts, of errors that workers would meet. They read files but no weights.

Speech: TypeAlias = Literal["chat", "text", "token ids"]
NO_KEY: Final = bytes(16)  # the check does not use the tenants' cache salts


def check_model(config: ServeConfig) -> Path:
    """Return the model's directory.

    Raises ModelError or ConfigError when some worker could not load its part of the model. The message of a
    ConfigError begins with the setting.
    """
    directory = resolve_model(config.model)
    model = read_model_config(directory)
    if config.engine.load_format != "dummy":
        read_entries(directory)
    choose_max_model_len(config.engine, model)
    check_supported(model, config.engine)
    paths = named_paths(config.gateway.lora_modules)
    if paths and not config.engine.enable_lora:
        raise ConfigError("gateway.lora_modules: adapters need engine.enable_lora (--enable-lora)")
    for path in paths.values():
        read_adapter(path, config.engine.max_lora_rank)
    read_draft_model_config(resolve_draft_model(config.engine), model)
    for role, pool in config.pools.items():
        if pool.num_workers:
            for key, check in RANK_CHECKS.items():
                try:
                    check(model, pool.engine(config.engine))
                except ConfigError as error:
                    owner = "engine" if getattr(pool, key) is None else role
                    raise ConfigError(f"{owner}.{key}: {error}") from None
    return directory


def check_settings(config: ServeConfig) -> None:
    """Raise ConfigError for a file of tenants that cannot be read, or a name that is not known.

    The names are those of the policy, of the transport and of each model's parsers.
    """
    if config.tenants is not None:
        Tenants.from_file(Path(config.tenants), NO_KEY)
    policy_class(config.router.policy)
    if config.transport != "auto":
        from baton.kvtransfer.transports.registry import transport_set  # torch: auto does not wait for it

        transport_set(config.transport)
    for model in config.models:
        ModelParsers.chosen(
            "",
            tool_call_parser=model.gateway.tool_call_parser,
            reasoning_parser=model.gateway.reasoning_parser,
        )


def speech_of(directory: Path, settings: TextSettings) -> Speech:
    """Return the form of the model's prompts.

    Raises ModelError for a damaged file, and ConfigError for settings that do not fit the model.
    """
    if not has_tokenizer(directory):
        return "token ids"
    template = ChatTemplate.from_directory(
        directory, settings.chat_template, settings.default_chat_template_kwargs
    )
    return "text" if template is None else "chat"
