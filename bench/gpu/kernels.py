"""The attention kernels beside the device's own rates, each checked on the inputs that are timed.

Shapes: B sequences, T tokens, H query heads, K kv heads, D head dim, P pages, L layers, S page size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from baton.bench.gpu.session import Rates, Session, require_close, require_equal
from baton.bench.machine import (
    Call,
    copy_bandwidth_gbps,
    gpu_state,
    machine_description,
    matmul_peak_tflops,
    read_bandwidth_gbps,
    seconds_per_call,
)
from baton.bench.report import Row, at_most, format_number
from baton.kernels.paged_attention import paged_attention_decode, paged_attention_decode_reference
from baton.kernels.pages import copy_pages
from baton.kernels.prefill_attention import prefill_attention, prefill_attention_reference

DTYPE = torch.bfloat16
PAGE_SIZES = (16, 64)
CHECKED_TOKENS = 64  # at the end of a prefill: they see all of it


@dataclass(frozen=True)
class PagedKv:
    """Random keys and values of several sequences, with pages shuffled over the pool."""

    pool: Tensor  # [P, L, 2, K, S, D]
    page_table: Tensor  # [B, pages] int32
    context_lens: Tensor  # [B] int32

    def of_sequence(self, layer: int, sequence: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return pages in fp32, page table and context lengths of one sequence, for a reference."""
        pages = self.pool[self.page_table[sequence].long(), layer].float()
        table = torch.arange(len(pages), dtype=torch.int32, device=pages.device)[None]
        return pages, table, self.context_lens[sequence : sequence + 1]


def environment(session: Session) -> Iterator[Row]:
    """Name the GPU and the versions; the notes are the figures."""
    machine, state = machine_description(), gpu_state(session.device)
    versions = {
        "GPU": machine.get("gpu", "none: its stand-ins run on the CPU"),
        "torch": f"{machine['torch']}, CUDA {machine.get('cuda', 'none')}",
        "triton": version("triton") if find_spec("triton") is not None else "none",
        "driver": state.get("driver_version", "none"),
        "NCCL": state.get("nccl", "none"),
    }
    for name, what in versions.items():
        yield Row(name, None, "", note=str(what))
    if session.device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(session.device)
        note = f"of {format_number(total_bytes / 2**30)}"
        yield Row("free memory", free_bytes / 2**30, "GiB", note=note)


def rates(session: Session) -> Iterator[Row]:
    """Measure the rates of the device and leave them in the session."""
    device, sizes = session.device, session.sizes
    read_gbps = read_bandwidth_gbps(device, sizes.buffer_bytes)
    yield Row("read bandwidth", read_gbps, "GB/s", note="a plain reduction")
    copy_gbps = copy_bandwidth_gbps(device, sizes.buffer_bytes)
    yield Row("copy bandwidth", copy_gbps, "GB/s", note="read and written bytes")
    peak_tflops = matmul_peak_tflops(device, DTYPE, sizes.matmul_size)
    yield Row("matmul peak, bf16", peak_tflops, "TFLOP/s", note=f"{sizes.matmul_size} cubed, random data")
    session.figures.rates = Rates(read_gbps, copy_gbps, peak_tflops)


def decode_kernel(session: Session) -> Iterator[Row]:
    """Measure the percent of read bandwidth, counting each key and value once."""
    for batch, context in session.sizes.decode_batches:
        name, bar = f"decode kernel, {batch} x {context:,}", 90.0 if batch > 1 else 80.0
        yield from _decode_rows(session, name, [context] * batch, bar)
    batch, context = session.sizes.decode_batches[0]
    lengths = torch.randint(context // 16, 2 * context, (batch,)).tolist()
    yield from _decode_rows(session, f"decode kernel, {batch} ragged to {2 * context:,}", lengths, 75.0)


def prefill_kernel(session: Session) -> Iterator[Row]:
    """Measure TFLOP/s over the causal half, beside the library's kernel on contiguous keys."""
    model = session.sizes.model
    for num_tokens in session.sizes.prefill_lengths:
        kv = _paged_kv(session, [num_tokens], 16)
        query_THD = _normal(session, num_tokens, model.num_heads, model.head_dim)
        calls = [_prefill(query_THD, kv, layer) for layer in range(kv.pool.shape[1])]
        _check_prefill(query_THD, kv)
        flops = 2 * model.num_heads * model.head_dim * num_tokens**2
        tflops = flops / seconds_per_call(calls, session.device) / 1e12
        percent = 100 * tflops / session.rates.peak_tflops
        note = f"{percent:.0f} % of matmul peak"
        yield Row(f"prefill kernel, {num_tokens:,} tokens", tflops, "TFLOP/s", note=note)
        rival = flops / seconds_per_call([_library_prefill(session, num_tokens)], session.device) / 1e12
        note = f"ours is {format_number(tflops / rival)} of it"
        yield Row(f"torch attention, {num_tokens:,} tokens", rival, "TFLOP/s", note=note)


def pages(session: Session) -> Iterator[Row]:
    """Measure gathers and scatters of whole pages and of single layers, in percent of a device copy."""
    model, num_moved = session.sizes.model, session.sizes.num_kv_pages // 2
    page = (2, model.num_kv_heads, PAGE_SIZES[0], model.head_dim)
    pool = _normal(session, 2 * num_moved, model.num_layers, *page)
    moved, others = torch.randperm(len(pool), device=session.device).split(num_moved)
    staging = torch.empty_like(pool[:num_moved])
    # Each layer has its own part of the staging memory: one small buffer for all would stay in the cache.
    layers = zip(pool.unbind(1), staging.view(model.num_layers, num_moved, *page), strict=True)
    for what, pairs in (("whole pages", [(pool, staging)]), ("one layer", list(layers))):
        for paged, packed in pairs:
            copy_pages(paged, moved, packed, None)
            require_equal(f"gather, {what}", packed, paged[moved])
            copy_pages(packed, None, paged, others)
            require_equal(f"scatter, {what}", paged[others], packed)
        calls: dict[str, list[Call]] = {
            "gather": [partial(copy_pages, paged, moved, packed, None) for paged, packed in pairs],
            "scatter": [partial(copy_pages, packed, None, paged, others) for paged, packed in pairs],
        }
        num_bytes = pairs[0][1].nbytes
        for verb, of_verb in calls.items():
            gbps = 2 * num_bytes / seconds_per_call(of_verb, session.device) / 1e9
            note = f"{format_number(num_bytes / 2**20)} MiB, {format_number(gbps)} GB/s"
            percent = 100 * gbps / session.rates.copy_gbps
            yield session.bar(f"{verb}, {what}", percent, "% of copy", 85.0, note)


def _decode_rows(session: Session, name: str, lengths: list[int], bar: float) -> Iterator[Row]:
    model = session.sizes.model
    num_bytes = sum(lengths) * 2 * model.num_kv_heads * model.head_dim * DTYPE.itemsize
    seconds = []
    for page_size in PAGE_SIZES:
        kv = _paged_kv(session, lengths, page_size)
        query_BHD = _normal(session, len(lengths), model.num_heads, model.head_dim)
        _check_decode(query_BHD, kv)
        calls = [_decode(query_BHD, kv, layer) for layer in range(kv.pool.shape[1])]
        seconds.append(seconds_per_call(calls, session.device))
        gbps = num_bytes / seconds[-1] / 1e9
        note = f"{format_number(seconds[-1] * 1e6)} us, {format_number(gbps)} GB/s"
        percent = 100 * gbps / session.rates.read_gbps
        yield session.bar(f"{name}, pages of {page_size}", percent, "% of read", bar, note)
        del kv, calls  # gigabytes
    slower = seconds[0] / seconds[1]
    row_name = f"{name}, time of pages of {PAGE_SIZES[0]} / {PAGE_SIZES[1]}"
    yield at_most(row_name, slower, "x", 1.05 if session.sizes.has_bars else None)


def _paged_kv(session: Session, lengths: list[int], page_size: int) -> PagedKv:
    model, device = session.sizes.model, session.device
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts), dtype=torch.int32)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, part in zip(table, order.split(counts), strict=True):
        row[: len(part)] = part
    page = (2, model.num_kv_heads, page_size, model.head_dim)
    pool = _normal(session, sum(counts), session.sizes.num_pool_layers, *page)
    return PagedKv(pool, table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device))


def _decode(query_BHD: Tensor, kv: PagedKv, layer: int) -> Callable[[], Tensor]:
    scale = query_BHD.shape[2] ** -0.5
    arguments = (query_BHD, kv.pool[:, layer], kv.page_table, kv.context_lens)
    return partial(paged_attention_decode, *arguments, scale=scale)


def _check_decode(query_BHD: Tensor, kv: PagedKv) -> None:
    """Check the first sequence in the first layer and the last sequence in the last layer."""
    scale = query_BHD.shape[2] ** -0.5
    for layer, sequence in ((0, 0), (kv.pool.shape[1] - 1, len(query_BHD) - 1)):
        got_BHD = _decode(query_BHD, kv, layer)()
        query_1HD = query_BHD[sequence : sequence + 1].float()
        expected = paged_attention_decode_reference(query_1HD, *kv.of_sequence(layer, sequence), scale=scale)
        require_close("decode kernel", got_BHD[sequence], expected[0])


def _prefill(query_THD: Tensor, kv: PagedKv, layer: int) -> Callable[[], Tensor]:
    return partial(
        prefill_attention,
        query_THD,
        kv.pool[:, layer],
        kv.page_table,
        torch.tensor([0, len(query_THD)], dtype=torch.int32, device=query_THD.device),
        kv.context_lens,
        scale=query_THD.shape[2] ** -0.5,
        max_seqlen_q=len(query_THD),
    )


def _check_prefill(query_THD: Tensor, kv: PagedKv) -> None:
    """Check the last tokens as a chunk after a prefix, and the first token, which sees only itself."""
    layer, num_heads, scale = kv.pool.shape[1] - 1, query_THD.shape[1], query_THD.shape[2] ** -0.5
    got_THD = _prefill(query_THD, kv, layer)()
    last_THD = query_THD[-CHECKED_TOKENS:].float()
    cu_seqlens = torch.tensor([0, len(last_THD)], dtype=torch.int32, device=query_THD.device)
    pages, table, lens = kv.of_sequence(layer, 0)
    expected = prefill_attention_reference(last_THD, pages, table, cu_seqlens, lens, scale=scale)
    require_close("prefill kernel, last tokens", got_THD[-CHECKED_TOKENS:], expected)
    first_value_KD = pages[table[0, 0], 1, :, 0]
    group_size = num_heads // first_value_KD.shape[0]
    require_close("prefill kernel, first token", got_THD[0], first_value_KD.repeat_interleave(group_size, 0))


def _library_prefill(session: Session, num_tokens: int) -> Call:
    """Return torch's causal attention, with keys already repeated for every query head."""
    model = session.sizes.model
    query, key, value = (_normal(session, 1, model.num_heads, num_tokens, model.head_dim) for _ in range(3))
    return partial(functional.scaled_dot_product_attention, query, key, value, is_causal=True)


def _normal(session: Session, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=DTYPE, device=session.device).normal_()
