"""The attention kernels beside the device's own rates, each checked on the inputs that are timed.

Shapes: B sequences, T tokens, H query heads, K kv heads, D head dim, P pages, L layers, S page size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from baton.bench.gpu.session import Rates, Session, products_name, require_close
from baton.bench.machine import (
    Call,
    copy_bandwidth_gbps,
    matmul_peak_tflops,
    read_bandwidth_gbps,
    seconds_per_call,
)
from baton.bench.report import Row, at_most, format_number
from baton.kernels.paged_attention import TARGET_PROGRAMS
from baton.kernels.prefill_attention import prefill_attention_reference
from baton.kernels.ragged_attention import RaggedBatch, ragged_attention
from baton.kernels.triton.kernel import kernel, runs_triton, tl

DTYPE = torch.bfloat16
PAGE_SIZES = (16, 64)
CHECKED_TOKENS = 64  # at the end of a prefill: they see all of it
READ_BLOCK: Final = 8192  # values that a program of `read_kernel` loads at once
EVERY_BATCH_BAR: Final = 85.0  # percent of read bandwidth, at every number of sequences
MISSES_NAMED: Final = 12
NUM_RIVAL_ROUNDS: Final = 3
FA3: Final = "fa3_fwd_interface"  # the module of the wheel fa3-fwd


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


def rates(session: Session) -> Iterator[Row]:
    """Measure the rates of the device and leave them in the session."""
    device, sizes = session.device, session.sizes
    library_gbps = read_bandwidth_gbps(device, sizes.buffer_bytes)
    kernel_gbps = _triton_read_gbps(session)
    read_gbps = max(library_gbps, kernel_gbps or 0.0)
    theirs = f"torch's reductions {format_number(library_gbps)}"
    ours = "no Triton here" if kernel_gbps is None else f"a Triton kernel {format_number(kernel_gbps)}"
    yield Row("read bandwidth", read_gbps, "GB/s", note=f"{theirs}, {ours}")
    copy_gbps = copy_bandwidth_gbps(device, sizes.buffer_bytes)
    yield Row("copy bandwidth", copy_gbps, "GB/s", note="read and written bytes")
    peak_tflops = matmul_peak_tflops(device, DTYPE, sizes.matmul_size)
    yield Row("matmul peak, bf16", peak_tflops, "TFLOP/s", note=f"{sizes.matmul_size} cubed, random data")
    session.figures.rates = Rates(read_gbps, copy_gbps, peak_tflops)


@kernel()
def read_kernel(
    values_ptr: tl.tensor,  # [num_values] fp32
    sums_ptr: tl.tensor,  # [num_programs] fp32
    num_values: int,
    BLOCK: tl.constexpr,
) -> None:
    """One program adds up every num_programs-th block. Its time is that of reading the values."""
    program = tl.program_id(0)
    total_N = tl.zeros([BLOCK], tl.float32)
    for start in range(program * BLOCK, num_values, tl.num_programs(0) * BLOCK):
        value_N = start + tl.arange(0, BLOCK)
        total_N += tl.load(values_ptr + value_N, mask=value_N < num_values, other=0.0)
    tl.store(sums_ptr + program, tl.sum(total_N, axis=0))


def read_sum(values: Tensor, sums: Tensor) -> Tensor:
    """Sum fp32 values, fewer than 2^31, by `read_kernel` with a program for each place of `sums`."""
    read_kernel[(len(sums),)](values, sums, len(values), BLOCK=READ_BLOCK, num_warps=8)
    return sums


def _triton_read_gbps(session: Session) -> float | None:
    """Return the rate of `read_kernel`; None where no Triton kernel runs."""
    values = torch.rand(session.sizes.buffer_bytes // 4, device=session.device)
    if not runs_triton(values):
        return None
    sums = torch.empty(TARGET_PROGRAMS, device=session.device)
    require_close("read kernel", read_sum(values, sums).sum(), values.sum())
    return values.nbytes / seconds_per_call([partial(read_sum, values, sums)], session.device) / 1e9


def products(session: Session) -> Iterator[Row]:
    """Measure the matrix products of a model alone, one graph for all layers: the floor of a step.

    Products are the library's. A decode step of B sequences has B rows in every matrix, a prefill of T tokens
    has T rows in the layers and one in the head.
    """
    sizes, model = session.sizes, session.sizes.model
    num_qkv, num_out = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim, model.hidden_size
    shapes = (
        (num_qkv, num_out),
        (num_out, model.num_heads * model.head_dim),
        (2 * model.intermediate_size, num_out),
        (num_out, model.intermediate_size),
    )
    layers = [_normal(session, *shape) for _ in range(model.num_layers) for shape in shapes]
    head = _normal(session, model.vocab_size, num_out)
    steps = [(batch, batch) for batch in sizes.step_batches]
    for num_tokens, num_logits in steps + [(num_tokens, 1) for num_tokens in sizes.model_prefill_lengths]:
        weights = [(weight, num_tokens) for weight in layers] + [(head, num_logits)]
        seconds = seconds_per_call([_multiply(session, weights)], session.device)
        name = products_name(num_tokens, num_logits)
        session.figures.product_seconds[name] = seconds
        flops = sum(2 * weight.numel() * num_rows for weight, num_rows in weights)
        gbps = sum(weight.nbytes for weight, _ in weights) / seconds / 1e9
        note = f"{format_number(flops / seconds / 1e12)} TFLOP/s, {format_number(gbps)} GB/s of weights"
        yield Row(name, 1e3 * seconds, "ms", note=note)


def _multiply(session: Session, weights: list[tuple[Tensor, int]]) -> Call:
    """Return a call that multiplies random rows, so many for each weight, into memory of its shape."""
    rows = {(num, weight.shape[1]): _normal(session, num, weight.shape[1]) for weight, num in weights}
    outs = {(num, len(weight)): _normal(session, num, len(weight)) for weight, num in weights}

    def run() -> None:
        for weight, num in weights:
            torch.mm(rows[num, weight.shape[1]], weight.t(), out=outs[num, len(weight)])

    return run


def decode_kernel(session: Session) -> Iterator[Row]:
    """Measure the percent of read bandwidth, counting each key and value once."""
    for batch, context in session.sizes.decode_batches:
        name, bar = f"decode kernel, {batch} x {context:,}", 90.0 if batch > 1 else 80.0
        yield from _decode_rows(session, name, [context] * batch, bar)
    batch, context = session.sizes.decode_batches[0]
    lengths = torch.randint(context // 16, 2 * context, (batch,)).tolist()
    yield from _decode_rows(session, f"decode kernel, {batch} ragged to {2 * context:,}", lengths, 75.0)


def decode_kernel_batches(session: Session) -> Iterator[Row]:
    """Measure the percent of read bandwidth at every number of sequences, which the worst one bounds."""
    most, context = session.sizes.every_batch
    kv = _paged_kv(session, [context] * most, PAGE_SIZES[0])
    query_BHD = _normal(session, most, session.sizes.model.num_heads, session.sizes.model.head_dim)
    percents = {batch: _percent_of_read(session, kv, query_BHD, batch) for batch in range(1, most + 1)}
    worst = min(percents, key=percents.__getitem__)
    misses = [f"{batch}: {percents[batch]:.0f}" for batch in percents if percents[batch] < EVERY_BATCH_BAR]
    note = f"at {worst} sequences, median {median(percents.values()):.0f}"
    if misses and session.sizes.has_bars:
        note += f"; below the bar: {', '.join(misses[:MISSES_NAMED])}, {len(misses)} in all"
    name = f"decode kernel, worst of 1 to {most} x {context:,}"
    yield session.bar(name, percents[worst], "% of read", EVERY_BATCH_BAR, note)


def _percent_of_read(session: Session, kv: PagedKv, query_BHD: Tensor, batch: int) -> float:
    part = PagedKv(kv.pool, kv.page_table[:batch], kv.context_lens[:batch])
    _check_decode(query_BHD[:batch], part)
    calls = [_decode(query_BHD[:batch], part, layer) for layer in range(kv.pool.shape[1])]
    num_bytes = _num_kv_bytes(session, int(part.context_lens.sum()))
    gbps = num_bytes / seconds_per_call(calls, session.device, num_runs=3) / 1e9
    return 100 * gbps / session.rates.read_gbps


def prefill_kernel(session: Session) -> Iterator[Row]:
    """Measure TFLOP/s over the causal half."""
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


def rivals(session: Session) -> Iterator[Row]:
    """Compare with other attention kernels, in turns: torch's on contiguous keys, FA3 on our own pages."""
    model = session.sizes.model
    for batch, context in session.sizes.decode_batches:
        kv = _paged_kv(session, [context] * batch, PAGE_SIZES[0])
        query_BHD = _normal(session, batch, model.num_heads, model.head_dim)
        ours: list[Call] = [_decode(query_BHD, kv, layer) for layer in range(kv.pool.shape[1])]
        theirs = {"torch SDPA": _library_decode(session, query_BHD, context)}
        theirs["FA3"] = _fa3_calls(query_BHD[:, None], kv)
        yield from _rival_rows(session, f"decode kernel, {batch} x {context:,}", ours, theirs)
        del kv, ours, theirs  # gigabytes
    for num_tokens in session.sizes.prefill_lengths:
        kv = _paged_kv(session, [num_tokens], PAGE_SIZES[0])
        query_THD = _normal(session, num_tokens, model.num_heads, model.head_dim)
        ours = [_prefill(query_THD, kv, layer) for layer in range(kv.pool.shape[1])]
        theirs = {"torch SDPA": [_library_prefill(session, num_tokens)]}
        theirs["FA3"] = _fa3_calls(query_THD[None], kv)
        yield from _rival_rows(session, f"prefill kernel, {num_tokens:,} tokens", ours, theirs)


def _decode_rows(session: Session, name: str, lengths: list[int], bar: float) -> Iterator[Row]:
    model = session.sizes.model
    num_bytes = _num_kv_bytes(session, sum(lengths))
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


def _num_kv_bytes(session: Session, num_tokens: int) -> int:
    """Return the bytes of one layer's keys and values."""
    model = session.sizes.model
    return num_tokens * 2 * model.num_kv_heads * model.head_dim * DTYPE.itemsize


def _rival_rows(
    session: Session, name: str, ours: list[Call], rivals: dict[str, list[Call]]
) -> Iterator[Row]:
    """Yield a row a rival: how many times as fast our kernel is. A rival without calls cannot run here."""
    for rival, theirs in rivals.items():
        if not theirs:
            yield Row(f"{name}: {rival}", None, "", note="skipped: not installed, or no GPU for it")
            continue
        rounds = [
            [seconds_per_call(calls, session.device, num_runs=3) for calls in (ours, theirs)]
            for _ in range(NUM_RIVAL_ROUNDS)
        ]
        our_s, their_s = (median(each) for each in zip(*rounds, strict=True))
        note = f"theirs {format_number(their_s * 1e6)} us, ours {format_number(our_s * 1e6)}"
        yield Row(f"{name}: times as fast as {rival}", their_s / our_s, "x", note=note)


def _fa3_calls(query_BTHD: Tensor, kv: PagedKv) -> list[Call]:
    """Return FA3 on the same pages, one call a layer, checked against our reference.

    Empty where `fa3-fwd` is not installed, or without a GPU.
    """
    if not query_BTHD.is_cuda or find_spec(FA3) is None:
        return []
    attend = import_module(FA3).flash_attn_with_kvcache
    calls: list[Callable[[], Tensor]] = []
    for pages in kv.pool.unbind(1):
        key_PSKD, value_PSKD = pages.transpose(2, 3).unbind(1)
        calls.append(
            partial(
                attend,
                query_BTHD,
                key_PSKD,
                value_PSKD,
                cache_seqlens=kv.context_lens,
                page_table=kv.page_table,
                softmax_scale=query_BTHD.shape[3] ** -0.5,
                causal=True,
            )
        )
    last_1HD = query_BTHD[-1, -1:].float()
    pages, table, lens = kv.of_sequence(0, len(query_BTHD) - 1)
    require_close("FA3", calls[0]()[-1, -1], _expected(last_1HD, pages, table, lens)[0])
    return [*calls]


def _library_decode(session: Session, query_BHD: Tensor, num_tokens: int) -> list[Call]:
    """Return torch's attention over contiguous keys and values of equal lengths, one call a layer."""
    model, calls = session.sizes.model, list[Call]()
    for _ in range(session.sizes.num_pool_layers):
        shape = (len(query_BHD), model.num_kv_heads, num_tokens, model.head_dim)
        key, value = _normal(session, *shape), _normal(session, *shape)
        attend = functional.scaled_dot_product_attention
        calls.append(partial(attend, query_BHD[:, :, None], key, value, enable_gqa=True))
    return calls


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
    starts = torch.arange(len(query_BHD) + 1, dtype=torch.int32, device=query_BHD.device)
    return _attend(query_BHD, kv, layer, starts, num_decodes=len(query_BHD), max_seqlen_q=1)


def _attend(
    query_THD: Tensor, kv: PagedKv, layer: int, starts: Tensor, *, num_decodes: int, max_seqlen_q: int
) -> Callable[[], Tensor]:
    batch = RaggedBatch(
        cu_seqlens_B1=starts,
        context_lens_B=kv.context_lens,
        page_table_BP=kv.page_table,
        num_decodes=num_decodes,
        max_seqlen_q=max_seqlen_q,
    )
    scale = query_THD.shape[2] ** -0.5
    return partial(ragged_attention, query_THD, kv.pool[:, layer], batch, scale=scale)


def _check_decode(query_BHD: Tensor, kv: PagedKv) -> None:
    """Check the first sequence in the first layer and the last sequence in the last layer."""
    for layer, sequence in ((0, 0), (kv.pool.shape[1] - 1, len(query_BHD) - 1)):
        got_BHD = _decode(query_BHD, kv, layer)()
        query_1HD = query_BHD[sequence : sequence + 1].float()
        expected = _expected(query_1HD, *kv.of_sequence(layer, sequence))
        require_close("decode kernel", got_BHD[sequence], expected[0])


def _expected(query_THD: Tensor, pages: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """Return the reference's attention of the last tokens of one sequence."""
    starts = torch.tensor([0, len(query_THD)], dtype=torch.int32)
    return prefill_attention_reference(
        query_THD, pages, table, starts, lens, scale=query_THD.shape[2] ** -0.5
    )


def _prefill(query_THD: Tensor, kv: PagedKv, layer: int) -> Callable[[], Tensor]:
    starts = torch.tensor([0, len(query_THD)], dtype=torch.int32, device=query_THD.device)
    return _attend(query_THD, kv, layer, starts, num_decodes=0, max_seqlen_q=len(query_THD))


def _check_prefill(query_THD: Tensor, kv: PagedKv) -> None:
    """Check the last tokens as a chunk after a prefix, and the first token, which sees only itself."""
    layer, num_heads = kv.pool.shape[1] - 1, query_THD.shape[1]
    got_THD = _prefill(query_THD, kv, layer)()
    last_THD = query_THD[-CHECKED_TOKENS:].float()
    pages, table, lens = kv.of_sequence(layer, 0)
    expected = _expected(last_THD, pages, table, lens)
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
