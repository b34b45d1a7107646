"""Arguments of the launchers' kernels at serving shapes, recorded instead of run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch

from baton.bench.gpu import kernels as gpu_suite
from baton.bench.gpu.tiles import Recorder
from baton.kernels import (
    experts,
    gated,
    linear,
    paged_attention,
    pages,
    prefill_attention,
    rms_norm,
    sample,
    store_kv,
)
from baton.kernels.quantised import WeightFormat
from baton.kernels.triton import quantised_tile
from baton.kernels.triton.kernel import Launch
from tests.kernels.quantised_cases import FORMATS

CPU = torch.device("cpu")


Run = Callable[[], object]


@dataclass(frozen=True)
class Scenario:
    name: str
    module: ModuleType
    kernel_name: str
    run: Run


def record(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Return the launches of the scenario's kernel, in order."""
    launches: list[Launch] = []
    recorder = Recorder(getattr(scenario.module, scenario.kernel_name), launches)
    for module in (scenario.module, quantised_tile):  # products with codes launch a kernel of the latter, too
        for name, value in [*vars(module).items()]:
            if name.endswith("_kernel") and not isinstance(value, ModuleType):
                monkeypatch.setattr(module, name, Recorder(value, []))
    monkeypatch.setattr(scenario.module, scenario.kernel_name, recorder)
    scenario.run()
    return launches


def scenarios() -> Iterator[Scenario]:
    """Every kernel, at the shapes of an 8B model and at awkward ones, in every dtype that it serves."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield from _row_scenarios(dtype)
        yield from _linear_scenarios(dtype)
        yield from _expert_scenarios(dtype)
        yield from _attention_scenarios(dtype)
    yield from _weight_code_scenarios()
    yield from _page_code_scenarios()
    yield from _page_scenarios()
    yield from _sample_scenarios()
    read = partial(gpu_suite.read_sum, torch.empty(2**16), torch.empty(4))
    yield Scenario("read", gpu_suite, "read_kernel", read)


def sampling_of(num_rows: int) -> sample.SamplingTensors:
    ones = torch.ones(num_rows)
    small, wide = ones.to(torch.int32), ones.to(torch.int64)
    return sample.SamplingTensors(ones, small, ones, ones, wide, small, wide)


def _sample_scenarios() -> Iterator[Scenario]:
    logits = torch.empty(4, 128256)
    for name, flags in (
        ("greedy", (False, False, False)),
        ("random", (True, False, False)),
        ("top_k", (True, True, False)),
        ("top_p", (True, False, True)),
        ("both", (True, True, True)),
    ):
        has_random, has_top_k, has_top_p = flags
        sampling = replace(sampling_of(4), has_random=has_random, has_top_k=has_top_k, has_top_p=has_top_p)
        kernels = [
            "peak",
            "join_parts",
            *(["draw"] if flags[0] else []),
            *(["select"] if any(flags[1:]) else []),
        ]
        for kernel in kernels:
            run = partial(sample.sample_triton, logits, sampling)
            yield Scenario(f"sample-{kernel}-{name}", sample, f"{kernel}_kernel", run)


def _row_scenarios(dtype: torch.dtype) -> Iterator[Scenario]:
    name = str(dtype).removeprefix("torch.")
    x, weight = torch.empty(3, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)
    heads, head_weight = torch.empty(3, 48, 128, dtype=dtype)[:, :32], torch.empty(128, dtype=dtype)
    kernel = "rms_norm_kernel"
    yield Scenario(f"rms_norm-{name}", rms_norm, kernel, partial(rms_norm.rms_norm_triton, x, weight, 1e-5))
    run: Run = partial(rms_norm.rms_norm_triton, x, weight, 1e-5, x.clone())
    yield Scenario(f"add_rms_norm-{name}", rms_norm, kernel, run)
    run = partial(rms_norm.rms_norm_triton, heads, head_weight, 1e-5)
    yield Scenario(f"rms_norm_heads-{name}", rms_norm, kernel, run)
    run = partial(gated.gated_triton, torch.empty(3, 2 * 14336, dtype=dtype))
    yield Scenario(f"gated-{name}", gated, "gated_kernel", run)
    for head_dim in (128, 80):
        qkv = torch.empty(3, 48, head_dim, dtype=dtype)
        query, key, value = qkv[:, :32], qkv[:, 32:40], qkv[:, 40:]
        table, three = torch.empty(64, head_dim), torch.zeros(3, dtype=torch.int64)
        pages = torch.empty(4, 2, 2, 8, 16, head_dim, dtype=dtype)[:, 0]
        run = partial(store_kv.rope_and_store_triton, query, key, value, table, three, pages, three)
        yield Scenario(f"rope_and_store-{head_dim}-{name}", store_kv, "rope_and_store_kernel", run)
    query, row = (torch.empty(3, heads, 576, dtype=dtype) for heads in (128, 1))
    parts = query[..., 512:], row[..., 512:], row[..., :512]
    pages = torch.empty(4, 2, 1, 1, 16, 576, dtype=dtype)[:, 0]
    run = partial(store_kv.rope_and_store_triton, *parts, torch.empty(64, 64), three, pages, three)
    yield Scenario(f"rope_and_store-latent-{name}", store_kv, "rope_and_store_kernel", run)


def _linear_scenarios(dtype: torch.dtype) -> Iterator[Scenario]:
    """Programs share the parts of a tile when there are few tiles; otherwise each computes whole tiles."""
    name = str(dtype).removeprefix("torch.")
    for label, shape, options in (
        ("qkv", (6144, 4096), {"bias_N": torch.empty(6144)}),
        ("out", (4096, 4096), {"num_splits": 2}),
        ("gate_up", (28672, 4096), {"gate": gated.SILU}),
        ("down", (4096, 14336), {"num_splits": 2}),
        ("head", (128256, 4096), {"out_dtype": torch.float32}),
        ("odd", (1030, 1100), {}),
    ):
        weight = linear.LinearWeight(
            torch.empty(shape, dtype=dtype), *shape, dtype, is_packed=False, arrivals=linear.new_arrivals(CPU)
        )
        for num_tokens in (3, 300, 8192):
            x = torch.empty(num_tokens, shape[1], dtype=dtype)
            run = partial(linear.linear_triton, x, weight, **options)
            yield Scenario(f"linear-{label}-{num_tokens}-{name}", linear, "linear_kernel", run)


def _expert_scenarios(dtype: torch.dtype) -> Iterator[Scenario]:
    """The experts of a model with 30 billion parameters, of which a token takes 3 billion."""
    name = str(dtype).removeprefix("torch.")
    starts, rows = torch.zeros(129, dtype=torch.int32), torch.zeros(8192, dtype=torch.int64)
    for label, shape, options in (
        ("gate_up", (128, 1536, 2048), {"gate": gated.SILU}),
        ("down", (128, 2048, 384), {"gate": None}),
        ("heads", (128, 512, 128), {"gate": None}),  # of latent attention in DeepSeek V3
    ):
        stacked = linear.LinearWeight(torch.empty(shape, dtype=dtype), *shape[1:], dtype, is_packed=False)
        weights = experts.ExpertWeights((), None, stacked)
        for num_tokens in (8, 8192):
            x = torch.empty(num_tokens, shape[2], dtype=dtype)
            run: Run = partial(
                experts.linear_experts_triton,
                x,
                weights,
                starts,
                rows[:num_tokens] if label == "gate_up" else None,
                **options,
            )
            yield Scenario(f"experts-{label}-{num_tokens}-{name}", linear, "linear_kernel", run)
    if dtype is torch.bfloat16:
        logits, routing = torch.empty(3, 128), experts.Routing(top_k=8, normalises=True)
        yield Scenario("route", experts, "route_kernel", partial(experts.route_triton, logits, routing))
        of_groups = replace(routing, uses_sigmoid=True, num_groups=8, num_chosen_groups=4, bias_X=logits[0])
        run = partial(experts.route_triton, logits, of_groups)
        yield Scenario("route-groups", experts, "route_kernel", run)
        down = linear.LinearWeight(torch.empty(64, 2048, 384, dtype=dtype), 2048, 384, dtype, is_packed=False)
        weights = experts.ExpertWeights((), None, down)
        chosen = torch.zeros(3, 8, dtype=torch.int64)
        for label, keeps_splits in (("combine", False), ("combine-splits", True)):
            mixture = experts.Mixture(
                weights,
                [weights, weights],
                routing,
                activation=gated.SILU,
                out_dtype=torch.float32 if keeps_splits else dtype,
                num_experts=128,
                keeps_splits=keeps_splits,
            )
            splits, shares = torch.empty(2, 24, 2048), torch.empty(3, 8)
            run = partial(experts.combine_triton, splits, mixture, shares, chosen, rows[:24], logits, None)
            yield Scenario(label, experts, "combine_kernel", run)


def _weight_code_scenarios() -> Iterator[Scenario]:
    """Weights of 8 and 4 bits, in groups of 128 inputs, of 32 in MXFP4."""
    dtype = torch.bfloat16
    for weight_format in FORMATS:
        group = 32 if weight_format is WeightFormat.MXFP4 else 128
        name = weight_format.name.lower()
        for label, shape, options in (
            ("qkv", (6144, 4096), {"bias_N": torch.empty(6144)}),
            ("out", (4096, 4096), {"num_splits": 2}),
            ("gate_up", (28672, 4096), {"gate": gated.SILU}),
        ):
            weight = _codes(weight_format, shape, group, dtype)
            for num_tokens in (3, 300):
                run: Run = partial(
                    linear.linear_triton, torch.empty(num_tokens, shape[1], dtype=dtype), weight, **options
                )
                yield Scenario(f"{name}-{label}-{num_tokens}", linear, "linear_kernel", run)
    for weight_format in (WeightFormat.INT8_ROUNDED, WeightFormat.MXFP4):
        weight = _codes(weight_format, (1536, 2048), 32, dtype)
        assert weight.vectors is not None
        stacked = replace(
            weight, data=weight.data.expand(128, -1, -1), vectors=weight.vectors.expand(128, -1, -1, -1)
        )
        run = partial(
            experts.linear_experts_triton,
            torch.empty(8, 2048, dtype=dtype),
            experts.ExpertWeights((), None, stacked),
            torch.zeros(129, dtype=torch.int32),
            gate=gated.SILU,
        )
        yield Scenario(f"experts-{weight_format.name.lower()}", linear, "linear_kernel", run)
    for group in (128, 24):
        run = partial(quantised_tile.round_inputs_triton, torch.empty(3, 48 * 128, dtype=dtype), group)
        yield Scenario(f"round_inputs-{group}", quantised_tile, "round_inputs_kernel", run)


def _codes(
    weight_format: WeightFormat, shape: tuple[int, int], group: int, dtype: torch.dtype
) -> linear.LinearWeight:
    """A weight without contents, as from `pack_quantised`."""
    num_outputs, num_inputs = shape
    codes = torch.empty((num_outputs, num_inputs * weight_format.num_bits // 8), dtype=torch.int8)
    num_vectors = 2 if weight_format is WeightFormat.INT4_ZEROS else 1
    return linear.LinearWeight(
        codes,
        *shape,
        dtype,
        is_packed=False,
        arrivals=linear.new_arrivals(CPU),
        group=group,
        format=weight_format,
        vectors=torch.empty(num_inputs // group, num_vectors, num_outputs),
    )


def _page_code_scenarios() -> Iterator[Scenario]:
    """Pages of one byte an element."""
    dtype = torch.bfloat16
    for codes, (head_dim, page_size) in product((torch.int8, torch.float8_e4m3fn), ((128, 16), (64, 64))):
        name = f"{str(codes).removeprefix('torch.')}-{head_dim}"
        pages = torch.empty(4, 2, 2, 8, page_size, head_dim + 2, dtype=torch.uint8).view(codes)[:, 0]
        qkv = torch.empty(3, 48, head_dim, dtype=dtype)
        query, key, value = qkv[:, :32], qkv[:, 32:40], qkv[:, 40:]
        positions, table = torch.zeros(3, dtype=torch.int64), torch.empty(64, head_dim)
        run: Run = partial(
            store_kv.rope_and_store_triton, query, key, value, table, positions, pages, positions
        )
        yield Scenario(f"rope_and_store-{name}", store_kv, "rope_and_store_kernel", run)
        ids, lens = torch.zeros(3, 8192 // page_size, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
        run = partial(paged_attention.paged_attention_decode_triton, query, pages, ids, lens, scale=0.1)
        yield Scenario(f"decode-{name}", paged_attention, "paged_attention_kernel", run)
        cu_seqlens = torch.arange(4, dtype=torch.int32)
        run = partial(
            prefill_attention.prefill_attention_triton,
            *(query, pages, ids, cu_seqlens, lens),
            scale=0.1,
            max_seqlen_q=1,  # a tile is as high as for the longest chunk
        )
        yield Scenario(f"prefill-{name}", prefill_attention, "prefill_attention_kernel", run)


def _attention_scenarios(dtype: torch.dtype) -> Iterator[Scenario]:
    name = str(dtype).removeprefix("torch.")
    shapes = (
        (128, 32, None, 16),
        (80, 56, 4096, 64),
        (256, 8, None, 1),
        (64, 64, 128, 16),
        (96, 8, None, 16),
        (576, 128, None, 16),
    )
    for head_dim, num_heads, window, page_size in shapes:
        options: dict[str, Any] = {"scale": 0.1, "window": window}
        if head_dim == 64:  # gpt-oss
            options["sinks_H"] = torch.empty(num_heads)
        pages = torch.empty(4, 2, 2, 8, page_size, head_dim, dtype=dtype)[:, 0]
        if head_dim == 576:  # DeepSeek V3: each eighth of the query heads attends over the one kv head
            options["value_dim"] = 512
            pages = pages[:, :1, :1].expand(-1, -1, 8, -1, -1)
        query = torch.empty(3, num_heads + 16, head_dim, dtype=dtype)[:, :num_heads]
        table, lens = torch.zeros(3, 8192 // page_size, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
        for label, width in (("split", table.shape[1]), ("whole", 1)):
            decode = partial(
                paged_attention.paged_attention_decode_triton, query, pages, table[:, :width], lens
            )
            run = partial(decode, **options)
            suffix = f"{label}-{head_dim}-{name}"
            yield Scenario(f"decode-{suffix}", paged_attention, "paged_attention_kernel", run)
        cu_seqlens = torch.arange(4, dtype=torch.int32)
        prefill = partial(prefill_attention.prefill_attention_triton, query, pages, table, cu_seqlens, lens)
        run = partial(prefill, **options, max_seqlen_q=2048)
        yield Scenario(f"prefill-{head_dim}-{name}", prefill_attention, "prefill_attention_kernel", run)


def _page_scenarios() -> Iterator[Scenario]:
    for dtype, page_elements in ((torch.bfloat16, 65536), (torch.float32, 33), (torch.uint8, 99)):
        pool = torch.empty(4, page_elements, dtype=dtype)
        staging, ids = torch.empty_like(pool), torch.arange(4)
        name = str(dtype).removeprefix("torch.")
        for verb, sides in (("gather", (ids, None)), ("scatter", (None, ids)), ("copy", (ids, ids))):
            run: Run = partial(pages.copy_pages_triton, pool, sides[0], staging, sides[1])
            yield Scenario(f"{verb}_pages-{name}", pages, "copy_pages_kernel", run)
    dtypes, codes_of = (torch.bfloat16, torch.float16, torch.float32), (torch.int8, torch.float8_e4m3fn)
    for dtype, codes in product(dtypes, codes_of):
        for num_rows, head_dim in ((8192, 128), (3, 80)):
            pool, ids = torch.empty(4, num_rows, head_dim, dtype=dtype), torch.arange(4)
            packed = torch.empty(4, num_rows, head_dim + 2, dtype=torch.uint8)
            name = f"{head_dim}-{codes}-{dtype}".replace("torch.", "")
            run = partial(pages.encode_pages_triton, pool, ids, codes, packed)
            yield Scenario(f"encode_pages-{name}", pages, "encode_pages_kernel", run)
            run = partial(pages.decode_pages_triton, pool, ids, codes, packed)
            yield Scenario(f"decode_pages-{name}", pages, "decode_pages_kernel", run)
