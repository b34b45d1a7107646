"""The runner calls CUDA in the right order: a stand-in for the CUDA runtime records the calls."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.clock import ManualClock
from baton.engine.cache.page_pool import mark_of
from baton.engine.engine import Engine
from baton.engine.models.adapters import AdaptedProjection, Adapters, AdapterTensors
from baton.engine.models.model import Model
from baton.engine.models.registry import read_model_config
from baton.engine.runner import cuda_graphs, model_runner, sampler
from baton.engine.runner.cuda_graphs import MAX_PROMPTS, StepGraphs, graph_shapes
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.replica_rank import ReplicaRank
from baton.engine.runner.step_inputs import (
    GraphInputs,
    GraphShape,
    ModelInput,
    StepArrays,
    StepBuilder,
    padding_step,
    warmup_steps,
)
from baton.engine.scheduler.sequence import Sequence
from baton.kernels import lora
from baton.kernels.decoder_stack import LayerGroups
from baton.kernels.lora import AdapterRows, LowRankWeights
from baton.kernels.sample import SamplingTensors, sample
from tests.batches import make_batch, make_sequence, rest_of
from tests.fake_cuda import DEVICE, Call, DeviceTensor, FakeCuda
from tests.tiny_models import VOCAB_SIZE, add, run_to_end, tiny_config

MAX_NUM_SEQS = 20
MAX_NUM_TOKENS = 600
SHAPES = graph_shapes(MAX_NUM_SEQS, MAX_NUM_TOKENS)
PAGE_SIZE, MAX_PAGES = 4, 24


class NumberModel:
    """The logits of a row are the numbers that a step has for it."""

    windows = (None,)

    def __init__(self, note: Callable[[str, int], None] = lambda name, value: None) -> None:
        self._note = note
        self.steps: list[ModelInput] = []

    def forward(self, step: ModelInput, kv_pool: Tensor, groups: LayerGroups | None = None) -> Tensor:
        self._note("forward", len(step.token_ids_T))
        self.steps.append(step)
        batch = step.attention
        num_tokens, num_seqs = len(step.token_ids_T), len(batch.context_lens_B)
        row_T = torch.arange(num_tokens, dtype=torch.int32)
        sequence_T = torch.searchsorted(batch.cu_seqlens_B1[1:].contiguous(), row_T, right=True)
        context_len_T = batch.context_lens_B[sequence_T.clamp(max=num_seqs - 1)].long()
        first_T = batch.cu_seqlens_B1[sequence_T.clamp(max=num_seqs - 1)]
        last_page_T = (context_len_T - 1).clamp(min=0) // PAGE_SIZE
        page_T = batch.page_table_BP[sequence_T.clamp(max=num_seqs - 1), last_page_T]
        of_step = (step.token_ids_T, step.positions_T, step.slots_T)
        of_sequence = (context_len_T, page_T.long(), row_T.long() - first_T)
        return torch.stack((*of_step, *of_sequence), dim=1)[step.logit_rows_R].float()

    def logits(self, hidden_RE: Tensor) -> Tensor:
        return torch.nn.functional.pad(hidden_RE, (0, VOCAB_SIZE - hidden_RE.shape[1]))


class OnDevice:
    """A model of the CPU that gives its logits as a tensor of the device."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.windows = model.windows
        self.forward = model.forward

    def logits(self, hidden_RE: Tensor) -> Tensor:
        return self._model.logits(hidden_RE).as_subclass(DeviceTensor)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    with cuda:
        yield cuda


def gpu_runner(
    directory: Path, stream_priority: int = 0, cache: dict[str, Any] | None = None, **settings: Any
) -> ModelRunner:
    config = tiny_config(
        directory,
        device="cuda",
        stream_priority=stream_priority,
        scheduler={"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_TOKENS},
        cache={"host_cache_memory_bytes": 2**16, **(cache or {})},
        **settings,
    )
    return ModelRunner(config, read_model_config(directory), ReplicaRank())


def serving_runner(cuda: FakeCuda, directory: Path, stream_priority: int = 0, **cache: Any) -> ModelRunner:
    runner = gpu_runner(directory, stream_priority, cache)
    runner.model = NumberModel(cuda.note)
    runner.allocate()
    return runner


def read_layout(directory: Path) -> tuple[int, ...]:
    """The shape of a page."""
    config = read_model_config(directory)
    return config.num_layers, 2, config.num_kv_heads, PAGE_SIZE, config.head_dim


def loaded_model(directory: Path) -> Model:
    runner = ModelRunner(tiny_config(directory), read_model_config(directory), ReplicaRank())
    runner.load()
    return OnDevice(runner.model)


@pytest.fixture
def runner(cuda: FakeCuda, tiny_model: Path) -> ModelRunner:
    """A runner that serves; the calls of its start are forgotten."""
    runner = serving_runner(cuda, tiny_model)
    cuda.calls.clear()
    return runner


def decoding(num_seqs: int, num_tokens: int, first_page: int = 0) -> list[Sequence]:
    sequences = [make_sequence(str(row), range(row, row + num_tokens)) for row in range(num_seqs)]
    num_pages = -(-num_tokens // PAGE_SIZE)
    for row, sequence in enumerate(sequences):
        start = first_page + row * num_pages
        sequence.page_table = list(range(start, start + num_pages))
    return sequences


def decode_step(num_seqs: int, num_tokens: int, **copies: Any) -> StepArrays:
    chunks = [rest_of(sequence, num_tokens - 1) for sequence in decoding(num_seqs, num_tokens)]
    batch = make_batch(*chunks, is_pure_decode=True, **copies)
    return StepBuilder(PAGE_SIZE, MAX_NUM_SEQS, MAX_PAGES).build(batch)


def mixed_step(num_decodes: int, num_tokens: int, num_prompts: int = 1, **fields: Any) -> StepArrays:
    """Each of the prompts has `num_tokens` tokens."""
    chunks = [rest_of(sequence, 8) for sequence in decoding(num_decodes, 9)]
    chunks += [rest_of(prompt) for prompt in decoding(num_prompts, num_tokens, first_page=70)]
    batch = make_batch(*chunks, **fields)
    return StepBuilder(PAGE_SIZE, MAX_NUM_SEQS, MAX_PAGES).build(batch)


def names(calls: list[Call]) -> list[str]:
    return [call.name for call in calls]


@torch.inference_mode()
def expected(arrays: StepArrays) -> list[list[float]]:
    model = NumberModel()
    rows: list[list[float]] = model.logits(
        model.forward(ModelInput.from_arrays(arrays), torch.empty(0))
    ).tolist()
    return rows


# The start.


def test_graphs_are_captured_largest_first_on_one_stream_before_the_engine_serves(
    cuda: FakeCuda, tiny_model: Path
) -> None:
    runner = serving_runner(cuda, tiny_model)
    captures = [index for index, call in enumerate(cuda.calls) if call.name.startswith("capture")]
    assert {cuda.calls[index].name for index in captures} == {"capture thread_local"}
    assert len({cuda.calls[index].value for index in captures}) == 1, "one stream"
    sizes = [cuda.calls[index + 1].value for index in captures]
    expected_sizes = [shape.num_rows for shape in (*SHAPES[:-3:-1], *reversed(SHAPES))]
    assert sizes == expected_sizes and sizes[2:] == sorted(sizes[2:], reverse=True)
    assert [cuda.calls[index - 2] for index in captures] == [Call("forward", size) for size in sizes]
    cuda.calls.clear()
    for num_seqs in range(1, MAX_NUM_SEQS + 1):
        runner.execute(decode_step(num_seqs, 9))
        runner.execute(mixed_step(num_seqs - 1, 4 * num_seqs))
    assert set(names(cuda.calls)) == {"upload", "record event", "on device", "replay"}
    assert names(cuda.calls).count("replay") == 2 * MAX_NUM_SEQS


@pytest.mark.parametrize("priority", [0, -1])
def test_steps_and_graphs_have_the_engines_priority(cuda: FakeCuda, tiny_model: Path, priority: int) -> None:
    runner = serving_runner(cuda, tiny_model, priority)
    assert {stream.priority for stream in cuda.streams} == {priority}
    used = torch.cuda.current_stream()
    assert used.priority == priority
    before = cuda.events_on[id(used)]
    runner.steps.make(7)
    assert cuda.events_on[id(used)] == before + 1, "the marks of steps follow another stream"


def test_every_small_step_has_a_graph_with_room(cuda: FakeCuda) -> None:
    model = NumberModel()
    graphs = StepGraphs(
        lambda step, kv_pool: model.logits(model.forward(step, kv_pool)),
        VOCAB_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_tokens=MAX_NUM_TOKENS,
        max_pages=MAX_PAGES,
        device=torch.device("cuda", 0),
    )
    for num_decodes in range(MAX_NUM_SEQS):
        for num_tokens in (1, 2, 31, 32, 33, 100, 256, 257, 511, 512):
            shape = graphs.shape_of(padding_step(num_tokens, num_decodes + 1, num_decodes=num_decodes))
            assert shape in SHAPES and shape.num_decodes >= num_decodes and shape.num_prompts > 1
            assert num_tokens <= shape.num_tokens <= max(32, 2 * num_tokens - 1)
    assert graphs.shape_of(padding_step(513, 1)) is None


def test_start_computes_every_kind_of_step_and_writes_no_page(cuda: FakeCuda, tiny_model: Path) -> None:
    runner = gpu_runner(tiny_model)
    runner.model = loaded_model(tiny_model)
    runner.allocate()
    assert not runner.pool.device.any()


class AdaptedModel(NumberModel):
    """Notes the rows of each step that have an adapter."""

    def __init__(self, adapters: Adapters) -> None:
        super().__init__()
        self._adapters = adapters
        self.adapted: list[tuple[int, AdapterRows | None]] = []  # tokens of a step, their adapters

    def forward(self, step: ModelInput, kv_pool: Tensor, groups: LayerGroups | None = None) -> Tensor:
        self.adapted.append((len(step.token_ids_T), self._adapters.rows))
        return super().forward(step, kv_pool, groups)


def adapted_runner(directory: Path) -> ModelRunner:
    """With adapters of up to rank 6, and one layer that they change."""
    runner = gpu_runner(directory, enable_lora=True, max_lora_rank=6)
    assert runner.adapters is not None
    name, (num_outputs, num_inputs) = next(iter(runner.adapters.shapes.items()))
    weights = LowRankWeights(num_outputs, num_inputs, torch.float32, DEVICE)
    runner.adapters.projections[name] = AdaptedProjection(0, 0, num_outputs, lambda rows: rows, weights)
    return runner


def test_start_computes_every_kind_of_step_with_an_adapter_of_the_highest_rank(
    cuda: FakeCuda, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = adapted_runner(tiny_model)
    assert runner.adapters is not None
    runner.model = model = AdaptedModel(runner.adapters)
    runner.allocate()
    plain = {num_tokens for num_tokens, rows in model.adapted if rows is None}
    adapted = {num_tokens for num_tokens, rows in model.adapted if rows is not None}
    steps = warmup_steps(MAX_NUM_TOKENS, runner.config.scheduler.largest_batch, MAX_PAGES)
    assert adapted == {len(step.token_ids) for step in steps} <= plain
    assert {rows.max_rank for _, rows in model.adapted if rows is not None} == {6}
    assert model.adapted[-1][1] is None, "graphs have no adapters"
    (projection,) = runner.adapters.projections.values()
    monkeypatch.setattr(lora, "linear", lambda *given, **options: pytest.fail("the slot is not free"))
    rows = AdapterRows(np.zeros(1, np.int32), 6, DEVICE)
    projection.weights.shrink(torch.ones(1, projection.weights.num_inputs), rows)


def test_adapter_of_a_lower_rank_computes_the_same_with_the_kernels_of_the_highest(
    cuda: FakeCuda, tiny_model: Path
) -> None:
    runner = adapted_runner(tiny_model)
    assert runner.adapters is not None
    (name, projection), *_ = runner.adapters.projections.items()
    num_outputs, num_inputs = runner.adapters.shapes[name]
    random = torch.Generator().manual_seed(0)
    a_RK, b_NR = (torch.randn(shape, generator=random) for shape in ((2, num_inputs), (num_outputs, 2)))
    x_TK = torch.randn((3, num_inputs), generator=random)
    runner.put_adapter(1, AdapterTensors(2, 0.5, {name: (a_RK, b_NR)}))
    rows = np.ones(3, np.int32), np.arange(3)
    with runner.adapters.step(*rows):
        assert runner.adapters.rows is not None and runner.adapters.rows.max_rank == 6
        hidden_TR = projection.weights.shrink(x_TK, runner.adapters.rows)
        y_TN = torch.zeros(3, num_outputs)
        projection.weights.expand(hidden_TR, runner.adapters.rows, y_TN)
    assert hidden_TR.shape == (3, 6)
    torch.testing.assert_close(y_TN.as_subclass(Tensor), x_TK @ a_RK.T @ (0.5 * b_NR).T)


def test_a_graph_derives_the_inputs_of_attention_by_itself(runner: ModelRunner) -> None:
    """Else a replay would read those of the warm-up, in memory that is freed by then."""
    model = runner.model
    assert isinstance(model, NumberModel)
    assert len(model.steps) > 2 * len(SHAPES)
    assert len({id(step) for step in model.steps}) == len(model.steps)


def test_start_compiles_the_sampler(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[torch.Size] = []
    monkeypatch.setattr(sampler, "warm_up", lambda logits_BV: shapes.append(logits_BV.shape))
    Engine(runner, ManualClock(), "a model")
    assert shapes == [(1, runner.model_config.vocab_size)]


@pytest.mark.parametrize(("driver_bytes", "counted_bytes"), [(0, 0), (1000, 1000), (5000, 2000)])
def test_pool_leaves_room_for_the_graphs(
    driver_bytes: int, counted_bytes: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All graphs share one memory pool; each also takes memory of the driver, which is bounded."""
    monkeypatch.setattr(model_runner, "CUDA_CONTEXT_BYTES", 0)
    monkeypatch.setattr(cuda_graphs, "MAX_DRIVER_BYTES", 2000)
    cuda = FakeCuda(total_bytes=4 * 2**20, shared_bytes=50_000, driver_bytes=driver_bytes)
    cuda.install(monkeypatch)
    with cuda:
        runner = serving_runner(cuda, tiny_model, kv_cache_memory_bytes=None)
    share_bytes = int(4 * 2**20 * runner.config.cache.gpu_memory_utilization)
    graph_bytes = 50_000 + len(SHAPES) * counted_bytes
    assert len(runner.pool.device) == (share_bytes - graph_bytes) // runner.layout.page_bytes


# Steps.


def test_decode_step_is_one_upload_and_one_replay(cuda: FakeCuda, runner: ModelRunner) -> None:
    arrays = decode_step(3, 9)
    logits_BV = runner.execute(arrays)
    # The copy on the device spreads the page tables; the last event is the mark of the step.
    assert names(cuda.calls) == ["upload", "record event", "on device", "replay", "record event"]
    assert logits_BV.tolist() == expected(arrays)


def test_replays_of_changing_batches_read_their_own_rows(cuda: FakeCuda, runner: ModelRunner) -> None:
    """Rows, widths and graphs change; what an earlier step left in the buffers is never read."""
    shapes = [(20, 80), (3, 9), (3, 10), (1, 90), (7, 1), (17, 33), (2, 33), (20, 4), (5, 96)]
    for num_seqs, num_tokens in [*shapes, *reversed(shapes)]:
        arrays = decode_step(num_seqs, num_tokens)
        assert runner.execute(arrays).tolist() == expected(arrays), (num_seqs, num_tokens)


def test_replays_of_mixed_steps_read_their_own_rows(cuda: FakeCuda, runner: ModelRunner) -> None:
    """Decodes, prompts and padding move to other rows than in the step; each keeps its own numbers."""
    shapes = [(3, 17, 1), (0, 5, 8), (19, 2, 1), (13, 32, 7), (1, 80, 2), (5, 64, 1), (0, 64, 3), (12, 3, 8)]
    for num_decodes, num_tokens, num_prompts in [*shapes, *reversed(shapes)]:
        arrays = mixed_step(num_decodes, num_tokens, num_prompts)
        cuda.calls.clear()
        assert runner.execute(arrays).tolist() == expected(arrays), (num_decodes, num_tokens, num_prompts)
        assert "replay" in names(cuda.calls)
        assert runner.execute(decode_step(7, 30)).tolist() == expected(decode_step(7, 30))


@pytest.mark.parametrize(("num_decodes", "num_tokens", "num_prompts"), [(5, 9, 1), (0, 9, 3), (2, 32, 1)])
def test_padding_rows_of_a_replay_store_nothing(
    num_decodes: int, num_tokens: int, num_prompts: int, cuda: FakeCuda, runner: ModelRunner
) -> None:
    model = runner.model
    assert isinstance(model, NumberModel)
    runner.execute(decode_step(20, 80))
    runner.execute(mixed_step(12, 9, 8))
    arrays = mixed_step(num_decodes, num_tokens, num_prompts)
    runner.execute(arrays)
    num_rows = (20 if num_decodes else 0) + 32  # of the smallest graph with room
    step = next(step for step in reversed(model.steps) if len(step.token_ids_T) == num_rows)
    is_padding = step.slots_T == -1
    assert int(is_padding.sum()) == num_rows - len(arrays.token_ids)
    assert not step.token_ids_T[is_padding].any() and not step.positions_T[is_padding].any()
    assert step.slots_T[~is_padding].tolist() == arrays.slots.tolist()
    assert int((step.attention.context_lens_B > 0).sum()) == len(arrays.context_lens)
    cu_seqlens_B1 = step.attention.cu_seqlens_B1
    assert int(cu_seqlens_B1[-1]) == num_rows and bool((cu_seqlens_B1.diff() >= 0).all())


def test_table_wider_than_the_longest_sequence_is_refused(runner: ModelRunner) -> None:
    arrays = decode_step(2, 9)
    wide = np.zeros((2, MAX_PAGES + 1), np.int32)
    with pytest.raises(ValueError, match="25 pages does not fit in graphs of 24"):
        runner.execute(arrays._replace(page_table=wide))


@pytest.mark.parametrize(("num_tokens", "num_prompts"), [(90, 6), (5, MAX_PROMPTS + 1)])
def test_mixed_step_without_a_graph_is_one_upload_and_one_forward(
    num_tokens: int, num_prompts: int, cuda: FakeCuda, runner: ModelRunner
) -> None:
    arrays = mixed_step(3, num_tokens, num_prompts)
    logits_RV = runner.execute(arrays)
    assert names(cuda.calls) == ["upload", "record event", "forward", "record event"]
    assert cuda.calls[2].value == len(arrays.token_ids) and logits_RV.tolist() == expected(arrays)


def test_step_that_reports_layers_is_computed_layer_by_layer(cuda: FakeCuda, runner: ModelRunner) -> None:
    runner.execute(mixed_step(0, 17)._replace(num_layer_groups=2))
    assert "replay" not in names(cuda.calls)


def all_rows(arrays: StepArrays) -> StepArrays:
    """Ask for the logits of every token."""
    return arrays._replace(logit_rows=np.arange(len(arrays.token_ids)))


def test_step_with_drafts_is_one_upload_and_one_replay(cuda: FakeCuda, runner: ModelRunner) -> None:
    """Drafts are in chunks like those of prompts, and each has a row of logits."""
    for num_decodes, num_tokens, num_prompts in (
        (0, 9, 1),
        (0, 32, 1),
        (0, 4, 8),
        (3, 27, 3),
        (12, 4, 8),
        (2, 4, 2),
    ):
        arrays = all_rows(mixed_step(num_decodes, num_tokens, num_prompts))
        cuda.calls.clear()
        logits_RV = runner.execute(arrays)
        assert names(cuda.calls) == ["upload", "record event", "on device", "replay", "record event"]
        assert logits_RV.tolist() == expected(arrays)


def test_more_rows_of_logits_than_a_graph_has_are_computed_without(
    cuda: FakeCuda, runner: ModelRunner
) -> None:
    """As prompt logprobs ask for."""
    arrays = all_rows(mixed_step(3, 13, 7))
    assert len(arrays.logit_rows) > GraphShape(20, 9, 64).num_logits
    assert runner.execute(arrays).tolist() == expected(arrays)
    assert "replay" not in names(cuda.calls)


def test_mixed_steps_agree_with_the_cpu_to_the_bit(cuda: FakeCuda, tiny_model: Path) -> None:
    runner = gpu_runner(tiny_model)
    runner.model = loaded_model(tiny_model)
    runner.allocate()
    arrays = mixed_step(3, 17, num_prompts=MAX_PROMPTS + 1)
    pool = torch.zeros(runner.pool.device.shape)
    on_cpu = runner.model.forward(ModelInput.from_arrays(arrays), pool)
    logits_RV = runner.model.logits(on_cpu)
    assert runner.execute(arrays).tolist() == logits_RV.tolist()
    assert bool(pool.any()) and runner.pool.device.tolist() == pool.tolist()


@pytest.mark.parametrize("shape", [GraphShape(8), GraphShape(20, 9, 256), GraphShape(5, 6, 64)], ids=repr)
@torch.inference_mode()
def test_padding_to_a_shape_changes_no_bit(shape: GraphShape, tiny_model: Path) -> None:
    """Neither of the logits nor of the keys and values; real kernels compute both, on the CPU."""
    model = loaded_model(tiny_model)
    inputs = GraphInputs([shape], MAX_PAGES, torch.device("cpu"))
    pools = torch.zeros(2, 100, *read_layout(tiny_model))
    steps = (decode_step(5, 30), mixed_step(5, 11, 5), mixed_step(2, 33), mixed_step(0, 7, 3))
    for arrays in (*steps, all_rows(mixed_step(2, 8, 4))):
        if len(arrays.token_ids) - arrays.num_decodes > shape.num_tokens:
            continue
        inputs.write(arrays, shape)
        padded, plain = (
            model.logits(model.forward(step, pool))
            for step, pool in zip((inputs.step(shape), ModelInput.from_arrays(arrays)), pools, strict=True)
        )
        assert padded[: len(plain)].tolist() == plain.tolist()
        assert torch.equal(pools[0], pools[1]) and bool(pools[0].any())


def test_padded_step_larger_than_any_other_gets_more_room(cuda: FakeCuda, runner: ModelRunner) -> None:
    arrays = mixed_step(3, 17, num_padded_tokens=9000)
    assert runner.execute(arrays).tolist() == expected(arrays)
    cuda.calls.clear()
    assert runner.execute(arrays).tolist() == expected(arrays)
    assert "pin" not in names(cuda.calls)


@pytest.mark.parametrize("step", [decode_step, mixed_step])
def test_host_never_writes_bytes_that_a_copy_still_reads(
    step: Callable[..., StepArrays], cuda: FakeCuda, runner: ModelRunner
) -> None:
    cuda.is_slow = True
    for _ in range(2):
        runner.execute(step(3, 17))
    assert "wait for event" not in names(cuda.calls), "the other buffer is free"
    cuda.calls.clear()
    runner.execute(step(3, 17))
    assert names(cuda.calls)[:2] == ["wait for event", "upload"]


@torch.inference_mode()  # as the pool was made
@pytest.mark.parametrize("step", [decode_step, mixed_step])
def test_page_copies_come_before_the_step_and_are_not_waited_for(
    step: Callable[..., StepArrays], cuda: FakeCuda, runner: ModelRunner
) -> None:
    copies = {"copies_to_host": ((60, 3), (61, 4)), "copies_to_device": ((62, 3),)}
    runner.pool.device[60] = 5.0
    cuda.calls.clear()
    runner.execute(step(3, 17, **copies))
    page_bytes = runner.layout.page_bytes
    assert cuda.calls[:3] == [Call("download", page_bytes)] * 2 + [Call("upload", page_bytes)]
    assert not any(name.startswith(("wait", "blocking", "pin")) for name in names(cuda.calls))
    assert bool((runner.pool.device[62] == 5.0).all())


def test_host_pages_and_no_more_are_pinned_until_they_are_freed(cuda: FakeCuda, tiny_model: Path) -> None:
    num_bytes = 3 * 2**14
    runner = serving_runner(cuda, tiny_model, host_cache_memory_bytes=num_bytes)
    assert cuda.registered == {runner.pool.host.data_ptr(): num_bytes}
    cuda.calls.clear()
    pages = runner.pool.host  # a user of the memory that lives on
    del runner.pool
    assert cuda.calls == [Call("wait for device"), Call("unpin", num_bytes)]
    assert not cuda.registered and not pages.any()


def test_any_thread_may_ask_how_far_the_steps_are(cuda: FakeCuda, runner: ModelRunner) -> None:
    cuda.is_slow = True
    arrays = decode_step(3, 17)
    runner.execute(arrays)
    with ThreadPoolExecutor(1) as other:
        assert not other.submit(runner.steps.has_passed, mark_of(arrays.step)).result()
    assert not cuda.strays, "a thread has opened a context on another GPU"


def test_refused_pinning_leaves_no_error_behind(cuda: FakeCuda, tiny_model: Path) -> None:
    cuda.pins_nothing = True
    runner = serving_runner(cuda, tiny_model)
    arrays = mixed_step(3, 17)
    assert runner.execute(arrays).tolist() == expected(arrays)
    assert not cuda.registered


def test_step_of_copies_alone_uploads_nothing_else(cuda: FakeCuda, runner: ModelRunner) -> None:
    arrays = StepBuilder(PAGE_SIZE, MAX_NUM_SEQS, MAX_PAGES).build(make_batch(copies_to_device=((3, 1),)))
    assert runner.execute(arrays).shape == (0, VOCAB_SIZE)
    assert names(cuda.calls) == ["upload", "record event"]


# Asynchronous scheduling.


def draw_on_device(logits_RV: Tensor, tensors: SamplingTensors) -> Tensor:
    """Draw by the kernel of the CPU; the tokens are on the device if the logits are."""
    return sample(logits_RV, tensors).as_subclass(type(logits_RV))


@pytest.fixture
def engine(runner: ModelRunner, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(sampler, "sample", draw_on_device)
    engine = Engine(runner, ManualClock(), "a model")
    cuda.calls.clear()
    return engine


def calls_of_step(engine: Engine, cuda: FakeCuda) -> list[str]:
    cuda.calls.clear()
    engine.step()
    return names(cuda.calls)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 1},
        {"logprobs": 3, "prompt_logprobs": 2},
        {"repetition_penalty": 1.2, "logit_bias": {3: 1.0}, "min_tokens": 3, "stop_token_ids": (1, 2)},
    ],
    ids=["random", "logprobs", "processors"],
)
def test_no_step_waits_but_for_the_tokens_of_the_last(
    sampling: dict[str, Any], cuda: FakeCuda, engine: Engine
) -> None:
    """Prompts come and end at different steps, some steps have graphs and others have none."""
    for number in range(12):
        add(
            engine, str(number), [5 + number] * (1 + 40 * (number % 3)), max_tokens=3 + number % 4, **sampling
        )
        calls = calls_of_step(engine, cuda)
        assert calls.count("wait for event") <= 1
        assert not any(name.startswith(("blocking", "wait in", "wait for device")) for name in calls)
        if "wait for event" in calls:
            waited = calls.index("wait for event")
            assert {"replay", "forward"} & set(calls[:waited]), "the next step is launched before"
    while engine.has_work():
        calls = calls_of_step(engine, cuda)
        assert not any(name.startswith(("blocking", "wait in", "wait for device")) for name in calls)
    engine.scheduler.check_integrity()


class ChainModel:
    """The token after token t at position p is (3 t + p) mod V."""

    windows = (None,)

    def forward(self, step: ModelInput, kv_pool: Tensor, groups: LayerGroups | None = None) -> Tensor:
        return (3 * step.token_ids_T + step.positions_T)[step.logit_rows_R]

    def logits(self, hidden_RE: Tensor) -> Tensor:
        return (torch.arange(VOCAB_SIZE) == hidden_RE[:, None] % VOCAB_SIZE).float()


def test_steps_read_the_tokens_that_were_sampled(
    cuda: FakeCuda, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the sequences change from step to step, with graphs and without."""
    monkeypatch.setattr(sampler, "sample", draw_on_device)
    runner = gpu_runner(tiny_model)
    runner.model = ChainModel()
    runner.allocate()
    engine = Engine(runner, ManualClock(), "a model")
    lengths = {str(number): 3 + 5 * number % 11 for number in range(30)}
    found: dict[str, list[int | None]] = {name: [] for name in lengths}
    outputs = []
    for number, (name, num_tokens) in enumerate(lengths.items()):
        add(engine, name, [number + 1] * (1 + 7 * number % 50), max_tokens=num_tokens)
        outputs += engine.step()
    for output in outputs + run_to_end(engine):
        found[output.request_id].append(output.token_id)
    for number, (name, num_tokens) in enumerate(lengths.items()):
        expected: list[int] = []
        token, position = number + 1, 7 * number % 50
        while len(expected) < num_tokens:
            token = (3 * token + position) % VOCAB_SIZE
            expected.append(token)
            position += 1
        assert found[name] == expected, name
    assert "replay" in names(cuda.calls)
