"""Every setting there is, with its default, in one table: adding a knob is a deliberate change here."""

from collections.abc import Iterator
from typing import Any

import msgspec

from baton.config import EngineConfig
from baton.gateway_config import GatewayConfig

KNOBS: dict[str, Any] = {
    "model": "required",
    "dtype": "auto",
    "load_format": "auto",
    "device": "auto",
    "tensor_parallel_size": 1,
    "max_model_len": None,
    "seed": 0,
    "cache.page_size": 16,
    "cache.kv_cache_memory_bytes": None,
    "cache.gpu_memory_utilization": 0.9,
    "cache.host_cache_memory_bytes": 0,
    "cache.enable_prefix_caching": True,
    "scheduler.max_num_seqs": 64,
    "scheduler.max_num_batched_tokens": 2048,
    "scheduler.policy": "continuous",
    "scheduler.max_queue_delay_ms": 0.0,
    "scheduler.preferred_batch_sizes": (),
}

GATEWAY_KNOBS: dict[str, Any] = {
    "model": "required",
    "router.host": "required",
    "router.port": "required",
    "served_model_name": "",
    "host": "127.0.0.1",
    "port": 8000,
    "shares_port": False,
    "tenants_file": None,
    "strict": False,
    "vllm_metric_names": False,
    "max_connections": 4096,
    "max_body_bytes": 4 * 2**20,
    "send_buffer_bytes": 128 * 2**10,
    "header_timeout_s": 10.0,
    "body_timeout_s": 30.0,
    "idle_timeout_s": 15.0,
    "stall_timeout_s": 30.0,
    "max_open_requests": 4096,
    "max_wait_s": 30.0,
    "ping_interval_s": 15.0,
    "drain_timeout_s": 60.0,
}


def knobs(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from knobs(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, "required" if field.required else field.default


def test_knobs_are_the_ones_in_the_table() -> None:
    assert dict(knobs(EngineConfig)) == KNOBS


def test_a_gateways_knobs_are_the_ones_in_the_table() -> None:
    assert dict(knobs(GatewayConfig)) == GATEWAY_KNOBS
