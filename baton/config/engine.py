"""The settings of an engine: scheduler, cache, model.

`engine_config` rejects unknown keys, wrong types and values outside the bounds of their types.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from baton.adapters import MAX_RANK
from baton.config.loader import build
from baton.errors import ConfigError
from baton.messages.bounds import MAX_NODES

# Far beyond any step that a machine could finish; they bound the memory of one step.
NumSequences: TypeAlias = Annotated[int, Meta(ge=1, le=2**16)]
NumStepTokens: TypeAlias = Annotated[int, Meta(ge=1, le=2**20)]
StreamPriority: TypeAlias = Annotated[int, Meta(ge=-5, le=0)]  # of CUDA: a lower number goes first
QueueDelay: TypeAlias = Annotated[float, Meta(ge=0, le=60_000)]
Seed: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size and the policy of steps."""

    max_num_seqs: NumSequences = 64  # sequences in one step of a worker
    # Tokens computed in one step, decodes and prefill chunks together.
    max_num_batched_tokens: NumStepTokens = 2048
    # How steps are filled. continuous: sequences join and leave at every step; static, dynamic: in batches.
    policy: Literal["continuous", "static", "dynamic"] = "continuous"
    max_queue_delay_ms: QueueDelay = 0.0  # how long a prefill may wait for others to share its step
    # A waiting window closes early when it reaches one of these.
    preferred_batch_sizes: tuple[NumSequences, ...] = ()
    # Plan the next step while one runs, so that a device never waits for the host. None: on a GPU. Pipeline
    # stages keep several steps in flight in any case.
    async_scheduling: bool | None = None

    def __post_init__(self) -> None:
        largest = max(self.preferred_batch_sizes, default=0)
        if largest > self.max_num_seqs:
            expected = f"expected at most {self.max_num_seqs} (max_num_seqs), got {largest}"
            raise ConfigError(f"scheduler.preferred_batch_sizes: {expected}")

    @property
    def largest_batch(self) -> int:
        """Sequences in the largest step: a health check may join `max_num_seqs` others."""
        return self.max_num_seqs + 1


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV pages on the device and on the host."""

    page_size: Annotated[int, Meta(ge=1)] = 16  # tokens in one KV page, a power of two
    # How pages store keys and values. auto: in the model's dtype. fp8 (E4M3), int8: in one byte, with a
    # scale for each token and head.
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = "auto"
    # How transfers between workers carry pages. auto: as they are. fp8, int8: in one byte, with a scale for
    # each token and head. The receiver's pages are then rounded, and tokens may differ. Equal on all workers.
    kv_transfer_dtype: Literal["auto", "fp8", "int8"] = "auto"
    # Bytes for KV pages; None: what gpu_memory_utilization leaves.
    kv_cache_memory_bytes: Annotated[int, Meta(ge=1)] | None = None
    # Share of the device that weights, activations and KV pages may take.
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    # Bytes of host memory of each rank for evicted and preempted KV pages; 0: none, they are computed again.
    # None: a sixteenth of the free memory, at most 8 GiB, and no more pages than the device has.
    host_cache_memory_bytes: Annotated[int, Meta(ge=0)] | None = None
    # The directory of KV pages that outlive host memory and the process; None: there is no disk tier.
    kv_disk_path: str | None = None
    kv_disk_bytes: Annotated[int, Meta(ge=1)] = 8 * 2**30  # of files there, for each worker
    enable_prefix_caching: bool = True  # reuse KV pages of equal prompt prefixes

    def __post_init__(self) -> None:
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"cache.page_size: expected a power of two, got {self.page_size}")
        if self.kv_transfer_dtype != "auto" and self.kv_cache_dtype != "auto":
            raise ConfigError(
                f"cache.kv_transfer_dtype: pages of {self.kv_cache_dtype} (cache.kv_cache_dtype) are sent as "
                f"they are: expected auto, got {self.kv_transfer_dtype}"
            )
        if self.kv_disk_path is not None and not (
            self.host_cache_memory_bytes != 0 and self.enable_prefix_caching
        ):
            raise ConfigError(
                "cache.kv_disk_path: pages on disk pass through host memory, and the prefix cache finds "
                "them: leave cache.host_cache_memory_bytes and cache.enable_prefix_caching on"
            )


DEFAULT_SHORTEST_MATCH: Final = 3


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of speculative decoding, by vLLM's keys. Only draft tokens that the model samples are kept.

    ngram: the tokens that followed the latest tokens earlier in the same sequence. suffix: also those of
    earlier answers to the same tenant. draft_model: a smaller model with the same vocabulary.
    """

    # ngram, suffix or draft_model; None: draft_model.
    method: Literal["ngram", "suffix", "draft_model"] | None = None
    model: str | None = None  # the draft model: a directory, or a repository of Hugging Face
    # The most draft tokens of a sequence in a step. Fewer are computed where more are predicted not to pay.
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] = 8
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] = 8  # the longest match that ngram and suffix seek
    # The shortest match, in tokens; None: 3, or prompt_lookup_max if that is less.
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] | None = None

    def __post_init__(self) -> None:
        if self.chosen_method == "draft_model" and not self.model:
            raise ConfigError("speculative.model: the method draft_model needs a model's directory")
        if self.chosen_method != "draft_model" and self.model is not None:
            raise ConfigError(f"speculative.model: the method {self.method} takes no model")
        if self.shortest_match > self.prompt_lookup_max:
            most = f"expected at most {self.prompt_lookup_max} (prompt_lookup_max)"
            raise ConfigError(f"speculative.prompt_lookup_min: {most}, got {self.prompt_lookup_min}")

    @property
    def shortest_match(self) -> int:
        """The shortest match that ngram and suffix use, in tokens."""
        least = self.prompt_lookup_min
        return min(DEFAULT_SHORTEST_MATCH, self.prompt_lookup_max) if least is None else least

    @property
    def chosen_method(self) -> str:
        """The method; without one in the settings, that of a draft model."""
        return self.method or "draft_model"


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of an engine, apart from its model."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of weights; auto: the checkpoint's
    # Round the weights of linear layers to 8 or 4 bits as they are read. int8 and int4 round the inputs of
    # these layers to 8 bits, too, in groups of up to 128 inputs.
    quantization: Literal["int8", "fp8", "int4"] | None = None
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: seeded random weights, only config.json is read
    device: Literal["auto", "cpu", "cuda"] = "auto"  # of workers; auto: cuda where there is a GPU
    tensor_parallel_size: Annotated[int, Meta(ge=1)] = 1  # ranks that one worker splits the model over
    # Stages over which one worker splits the layers of the model, on CPUs only. Each stage has
    # tensor_parallel_size ranks.
    pipeline_parallel_size: Annotated[int, Meta(ge=1)] = 1
    # Nodes of Ray over which the stages of one worker are spread: each node has as many consecutive stages.
    # CPUs only.
    nnodes: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 1
    # Each tensor-parallel rank has whole experts of a mixture, instead of a part of every expert.
    enable_expert_parallel: bool = False
    # Tokens, prompt and output together, one of each at least; None: the model's own limit.
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    # On a GPU: a token does not depend on what shares its batch, on chunks, or on the number of ranks. Costs
    # speed. Without it a GPU multiplies plain weights with torch; quantised weights always use the Triton
    # kernel. A CPU is always batch-invariant.
    batch_invariant: bool = True
    # Priority of CUDA streams where processes share a GPU: -1 goes before 0. `baton serve` gives decode
    # workers that share a GPU -1 in place of 0.
    stream_priority: StreamPriority = 0
    seed: Seed = 0  # of sampling for requests without a seed of their own, and of dummy weights
    cache: CacheConfig = msgspec.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)
    # Logits processors from outside the tree, package.module:Class each. See docs/extending.md.
    logits_processors: tuple[str, ...] = ()
    enable_lora: bool = False  # serve LoRA adapters beside the model
    # Adapters that a worker computes with; more while more have requests.
    max_loras: Annotated[int, Meta(ge=1, le=1024)] = 8
    # Adapters that a worker keeps in host memory; the files of others are read again. None: max_loras.
    max_cpu_loras: Annotated[int, Meta(ge=1, le=1024)] | None = None
    max_lora_rank: Annotated[int, Meta(ge=1, le=MAX_RANK)] = 16  # the highest rank of an adapter
    # Speculative decoding on workers that decode, such as {"method": "ngram"}; None: off.
    speculative: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        if self.speculative is not None and self.scheduler.async_scheduling:
            raise ConfigError(
                "scheduler.async_scheduling: with speculative decoding, a step is planned from the tokens of "
                "the step before"
            )
        if self.nnodes > 1 and self.cache.kv_disk_path is not None:
            raise ConfigError(
                "cache.kv_disk_path: the disk tier needs all ranks of a worker on one node: "
                f"expected nnodes 1, got {self.nnodes}"
            )

    def check_nodes(self) -> None:
        """Raise ConfigError unless the stages of a worker can be spread evenly over its nodes."""
        if self.pipeline_parallel_size % self.nnodes:
            raise ConfigError(
                f"nnodes: {self.pipeline_parallel_size} pipeline stages (pipeline_parallel_size) cannot be "
                f"spread evenly over {self.nnodes} nodes"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks of one worker."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one worker on each of its nodes."""
        return self.num_ranks // self.nnodes

    @property
    def num_cpu_loras(self) -> int:
        """The adapters that a worker keeps in host memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


EngineSettingsT = TypeVar("EngineSettingsT", bound=EngineSettings)


class EngineConfig(EngineSettings, frozen=True):
    """The settings of an engine with its model."""

    model: str  # a local directory in Hugging Face layout

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_nodes()
        if not self.model:
            raise ConfigError("model: expected a directory, got an empty string")


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration in a nested plain mapping (from YAML, JSON or the command line).

    Keys are field names, `{"model": ..., "cache": {"page_size": 16}}`; sizes in bytes may be written
    "4GiB", and a part may be its struct, CacheConfig(page_size=16). Raises ConfigError with the full dotted
    key on an unknown key, a wrong type or a bad value.
    """
    return build(EngineConfig, settings)


class RankSidecar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Code that runs beside each rank that is a process of its own: see engine/runner/tp_worker.py.

    Every rank's process imports the factory itself; only the two strings cross to the process.
    """

    factory: str  # "package.module:name"; called with `arguments`, it returns the sidecar of one rank
    arguments: str
