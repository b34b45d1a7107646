"""A stage of the GPU suite gets a `Session`: its device, sizes, engine, and the figures of earlier stages."""

import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.bench.engine.replica import TOY_LLAMA, LlamaShape, RecordedEngine, load_replica
from baton.bench.report import Row, at_least

LLAMA_8B = LlamaShape(
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_positions=131072,
)


class WrongResult(Exception):
    """A kernel or model computed a wrong result, so its speed means nothing."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of every stage. Figures at toy size have no bars."""

    has_bars: bool
    buffer_bytes: int  # read and copied to measure the memory's rate
    matmul_size: int
    model: LlamaShape  # kernels are run with its heads
    num_pool_layers: int  # calls of one timing go from layer to layer, so that no cache helps
    decode_batches: tuple[tuple[int, int], ...]  # (sequences, tokens of context)
    every_batch: tuple[int, int]  # (most sequences, tokens of context): every number of sequences
    prefill_lengths: tuple[int, ...]
    num_kv_pages: int  # of a pool that transfers gather from and scatter to, 16 tokens each
    kv_units: tuple[int, ...]  # pages gathered or scattered at once
    kv_moved_units: tuple[int, ...]  # pages of one push between two processes
    kv_cache_bytes: int
    max_model_len: int
    step_batches: tuple[int, ...]
    step_context: int
    num_steps: int
    model_prefill_lengths: tuple[int, ...]
    num_rival_requests: int  # of each load that vLLM gets as well
    rival_lengths: tuple[int, int]  # tokens in and out; the first also caps lengths like those of ShareGPT


FULL = Sizes(
    has_bars=True,
    buffer_bytes=2**32,
    matmul_size=8192,
    model=LLAMA_8B,
    num_pool_layers=8,
    decode_batches=((64, 1024), (256, 1024), (1, 32768)),
    every_batch=(256, 1024),
    prefill_lengths=(2048, 8192, 32768),
    num_kv_pages=512,
    kv_units=(1, 8, 128),
    kv_moved_units=(32, 256, 2048),
    kv_cache_bytes=40 * 2**30,
    max_model_len=8448,
    step_batches=(1, 64, 256),
    step_context=1000,
    num_steps=40,
    model_prefill_lengths=(2048, 8192),
    num_rival_requests=256,
    rival_lengths=(1024, 128),
)
TOY = Sizes(
    has_bars=False,
    buffer_bytes=2**20,
    matmul_size=64,
    model=TOY_LLAMA,
    num_pool_layers=2,
    decode_batches=((4, 64), (1, 128)),
    every_batch=(3, 64),
    prefill_lengths=(32, 64),
    num_kv_pages=8,
    kv_units=(1, 2),
    kv_moved_units=(1, 4),
    kv_cache_bytes=2**23,
    max_model_len=256,
    step_batches=(1, 4),
    step_context=40,
    num_steps=4,
    model_prefill_lengths=(32, 64),
    num_rival_requests=4,
    rival_lengths=(32, 8),
)


@dataclass(frozen=True)
class Rates:
    """Rates of the device, measured in this run."""

    read_gbps: float
    copy_gbps: float  # bytes read and bytes written
    peak_tflops: float  # bf16


@dataclass
class Figures:
    """The figures that a stage records for later stages."""

    rates: Rates | None = None
    step_seconds: dict[str, float] = field(default_factory=dict)  # row -> our decode step
    prefill_seconds: dict[int, float] = field(default_factory=dict)  # tokens -> our prefill
    product_seconds: dict[str, float] = field(default_factory=dict)  # row -> matrix products alone


@dataclass
class Session:
    """The device and the sizes of a stage, and the figures of earlier stages."""

    device: torch.device
    sizes: Sizes
    figures: Figures = field(default_factory=Figures)
    batch_invariant: bool = True
    rival_python: str = sys.executable  # has vLLM, or not
    _replica: RecordedEngine | None = None

    @property
    def rates(self) -> Rates:
        if self.figures.rates is None:
            raise RuntimeError("the device's rates were not measured: there is nothing to compare with")
        return self.figures.rates

    @property
    def replica(self) -> RecordedEngine:
        """The engine of the 8B shape, loaded when first asked for."""
        if self._replica is None:
            sizes = self.sizes
            settings = {
                "device": self.device.type,
                "batch_invariant": self.batch_invariant,
                "max_model_len": sizes.max_model_len,
                "cache": {"kv_cache_memory_bytes": sizes.kv_cache_bytes, "enable_prefix_caching": False},
                "scheduler": {
                    "max_num_seqs": max(sizes.step_batches),
                    "max_num_batched_tokens": max(sizes.model_prefill_lengths),
                },
            }
            self._replica = RecordedEngine(load_replica(sizes.model, settings))
        return self._replica

    def bar(self, name: str, value: float, unit: str, bar: float | None, note: str = "") -> Row:
        """Return a row with this lower limit, or without one where the sizes have no bars."""
        return at_least(name, value, unit, bar if self.sizes.has_bars else None, note)


def products_name(num_tokens: int, num_logits: int) -> str:
    """Return the name of the matrix products of a step with so many rows in the layers and in the head."""
    return f"matrix products alone, {num_tokens:,} tokens, {num_logits:,} logits"


def require_close(what: str, got: Tensor, expected: Tensor, limit: float = 1e-2) -> None:
    """Raise WrongResult unless |got - expected| / |expected| is under the limit; NaN never is."""
    got, expected = got.double().cpu(), expected.double().cpu()
    error = float((got - expected).norm() / expected.norm())
    if not error < limit:
        raise WrongResult(f"{what}: relative error {error:.2g}, allowed {limit:g}")


def require_equal(what: str, got: Tensor, expected: Tensor) -> None:
    """Raise WrongResult unless the bytes are equal."""
    if not torch.equal(got, expected):
        raise WrongResult(f"{what}: the bytes differ")
