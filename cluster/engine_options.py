"""The options of an engine, spelled as vLLM spells them: `engine.<key>` of EngineSettings."""

from typing import Final

from baton.cluster.option_kinds import count, dtype, integers, load_format
from baton.cluster.options import Option, Switch

ENGINE_OPTIONS: Final = (
    Option("--dtype", "engine.dtype", dtype, "NAME", "auto, float32, bfloat16 or float16 (auto)"),
    Option(
        "--load-format", "engine.load_format", load_format, "NAME", "auto, or dummy: random weights (auto)"
    ),
    Option("--device", "engine.device", str, "NAME", "auto, cpu or cuda (auto)"),
    Option("--tensor-parallel-size -tp", "engine.tensor_parallel_size", int, "N", "ranks of the model (1)"),
    Option("--engine-seed", "engine.seed", int, "N", "of dummy weights and of answers without --seed (0)"),
    Option(
        "--max-model-len", "engine.max_model_len", count, "N", "tokens of prompt and answer, as 4096 or 4k"
    ),
    Option("--max-num-seqs", "engine.scheduler.max_num_seqs", int, "N", "sequences in one step (64)"),
    Option(
        "--max-num-batched-tokens",
        "engine.scheduler.max_num_batched_tokens",
        count,
        "N",
        "tokens computed in one step, prompts in chunks (2048)",
    ),
    Option(
        "--scheduler-policy",
        "engine.scheduler.policy",
        str,
        "NAME",
        "how requests are batched: continuous, static or dynamic (continuous)",
    ),
    Option(
        "--max-queue-delay-ms",
        "engine.scheduler.max_queue_delay_ms",
        float,
        "X",
        "milliseconds that a prompt may wait for others to share its step (0)",
    ),
    Option(
        "--preferred-batch-sizes",
        "engine.scheduler.preferred_batch_sizes",
        integers,
        "SIZES",
        "numbers of waiting prompts, as 4,8, at which the wait ends early",
    ),
    Option("--block-size --page-size", "engine.cache.page_size", int, "N", "tokens in one KV page (16)"),
    Option(
        "--kv-cache-memory --kv-cache-memory-bytes",
        "engine.cache.kv_cache_memory_bytes",
        str,
        "SIZE",
        "memory of the KV cache on each rank, as 4GiB (what is free)",
    ),
    Option(
        "--gpu-memory-utilization",
        "engine.cache.gpu_memory_utilization",
        float,
        "X",
        "share of a GPU's memory to use, weights included (0.9); a CPU ignores it",
    ),
    Option(
        "--host-cache-memory",
        "engine.cache.host_cache_memory_bytes",
        str,
        "SIZE",
        "host memory that KV pages are swapped to, as 4GiB (0)",
    ),
)
ENGINE_SWITCHES: Final = (
    Switch(
        "--enable-prefix-caching",
        "engine.cache.enable_prefix_caching",
        True,
        "reuse the KV of known prefixes (the default)",
    ),
    Switch(
        "--no-enable-prefix-caching",
        "engine.cache.enable_prefix_caching",
        False,
        "compute every prompt from its first token",
    ),
)
