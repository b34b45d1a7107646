"""Every setting there is, with its default, in one table: adding a knob is a deliberate change here."""

from collections.abc import Iterator
from typing import Any

import msgspec

from baton.config import EngineConfig

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


def knobs(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from knobs(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, "required" if field.required else field.default


def test_knobs_are_the_ones_in_the_table() -> None:
    assert dict(knobs(EngineConfig)) == KNOBS
