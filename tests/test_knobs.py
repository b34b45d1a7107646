"""Every setting with its default in one table: a new setting is a deliberate change here."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from baton.config.cluster import ServeConfig, WorkerConfig
from baton.config.engine import EngineConfig
from baton.config.gateway import GatewayConfig

KNOBS: dict[str, Any] = {
    "model": "required",
    "dtype": "auto",
    "load_format": "auto",
    "device": "auto",
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "nnodes": 1,
    "enable_expert_parallel": False,
    "max_model_len": None,
    "quantization": None,
    "batch_invariant": True,
    "stream_priority": 0,
    "seed": 0,
    "cache.page_size": 16,
    "cache.kv_cache_dtype": "auto",
    "cache.kv_transfer_dtype": "auto",
    "cache.kv_cache_memory_bytes": None,
    "cache.gpu_memory_utilization": 0.9,
    "cache.host_cache_memory_bytes": None,
    "cache.kv_disk_path": None,
    "cache.kv_disk_bytes": 8 * 2**30,
    "cache.enable_prefix_caching": True,
    "scheduler.max_num_seqs": 64,
    "scheduler.max_num_batched_tokens": 2048,
    "scheduler.policy": "continuous",
    "scheduler.max_queue_delay_ms": 0.0,
    "scheduler.preferred_batch_sizes": (),
    "scheduler.async_scheduling": None,
    "enable_lora": False,
    "max_loras": 8,
    "max_cpu_loras": None,
    "max_lora_rank": 16,
    "logits_processors": (),
    "speculative": None,
}

GATEWAY_KNOBS: dict[str, Any] = {
    "model": "required",
    "routers": "required",
    "served_model_name": "",
    "other_models": {},
    "host": "127.0.0.1",
    "port": 8000,
    "shares_port": False,
    "expects_prefill": None,
    "tenants_file": None,
    "strict": False,
    "chat_template": None,
    "tool_call_parser": None,
    "reasoning_parser": None,
    "generation_config": "auto",
    "override_generation_config": None,
    "default_chat_template_kwargs": {},
    "vllm_metric_names": True,
    "max_connections": 4096,
    "max_body_bytes": 4 * 2**20,
    "send_buffer_bytes": 128 * 2**10,
    "header_timeout_s": 10.0,
    "body_timeout_s": 30.0,
    "idle_timeout_s": 15.0,
    "stall_timeout_s": 30.0,
    "max_open_requests": 4096,
    "max_answer_entries": 2**22,
    "max_input_bytes": 256 * 2**20,
    "max_answer_bytes": 72 * 2**20,
    "max_stored_responses": 1024,
    "max_stored_response_bytes": 16 * 2**20,
    "max_wait_s": 30.0,
    "max_begun_wait_s": 300.0,
    "wake_on_request": False,
    "ping_interval_s": 15.0,
    "operator_port": None,
    "lora_modules": (),
    "allowed_origins": (),
    "otlp_traces_endpoint": None,
    "trace_sample_ratio": 1.0,
    "trace_slow_s": None,
    "resume_window_s": 600.0,
    "drain_timeout_s": 30.0,
    "link_timeout_s": 8.0,
}

WORKER_KNOBS: dict[str, Any] = {
    "role": "required",
    "name": "required",
    "model_name": "required",
    **{f"engine.{name}": default for name, default in KNOBS.items()},
    "routers": "required",
    "host": "127.0.0.1",
    "port": 0,
    "transport": "auto",
    "kv_digests": True,
    "kv_streams": 2,
    "drain_timeout_s": 30.0,
    "link_timeout_s": 8.0,
    "step_timeout_s": 30.0,
}

# Settings of one gateway process, which `baton serve` sets itself.
GATEWAYS_PLACE = {
    *("model", "routers", "served_model_name", "other_models", "host", "port", "shares_port"),
    *("expects_prefill", "tenants_file", "drain_timeout_s", "link_timeout_s"),
}
OF_EACH_ROLE: dict[str, Any] = {
    "num_workers": 1,
    "tensor_parallel_size": None,
    "pipeline_parallel_size": None,
    "nnodes": None,
    "enable_expert_parallel": None,
    "page_size": None,
    "cores_per_rank": None,
    "ray_resources": {},
}
SERVE_KNOBS: dict[str, Any] = {
    "model": "required",
    "served_model_name": None,
    "other_models": {},
    "runtime": "ray",
    "ray_address": None,
    "host": "127.0.0.1",
    "port": 8000,
    "gateways": 1,
    "routers": 1,
    **{f"prefill.{name}": default for name, default in OF_EACH_ROLE.items()},
    **{f"decode.{name}": default for name, default in OF_EACH_ROLE.items()},
    "transport": "auto",
    "kv_digests": True,
    "kv_streams": 2,
    "tenants": None,
    "cluster_key_file": None,
    "start_timeout_s": 600.0,
    "drain_timeout_s": 30.0,
    "link_timeout_s": 8.0,
    "step_timeout_s": 30.0,
    "router.host": "127.0.0.1",
    "router.port": 0,
    "router.link_timeout_s": 8.0,
    "router.policy": "cost",
    "router.local_prefill_tokens": 16,
    "router.redis": "auto",
    "router.decision_log": None,
    "router.recording_s": 900.0,
    "router.recording_memory_bytes": 2**26,
    "router.max_attempts": 8192,
    "router.seed": 0,
    **{f"gateway.{name}": value for name, value in GATEWAY_KNOBS.items() if name not in GATEWAYS_PLACE},
    **{f"engine.{name}": default for name, default in KNOBS.items() if name != "model"},
    "planner.mode": "off",
    "planner.interval_s": 30.0,
    "planner.ttft_ms": None,
    "planner.tpot_ms": None,
    "planner.attainment": 0.99,
    "planner.min_prefill": 1,
    "planner.min_decode": 1,
    "planner.max_workers": None,
    "planner.max_change": 4,
    "planner.startup_s": 120.0,
    "planner.manual_hold_s": 1800.0,
    "planner.times": None,
    "planner.log": None,
}


def knobs(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from knobs(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, _default(field)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.required:
        return "required"
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


@pytest.mark.parametrize(
    ("struct", "table"),
    [
        (EngineConfig, KNOBS),
        (GatewayConfig, GATEWAY_KNOBS),
        (WorkerConfig, WORKER_KNOBS),
        (ServeConfig, SERVE_KNOBS),
    ],
)
def test_settings_and_defaults_are_those_of_the_table(
    struct: type[msgspec.Struct], table: dict[str, Any]
) -> None:
    assert dict(knobs(struct)) == table
