"""A step reports layers with written keys and values while later layers are still to come."""

from collections.abc import Sequence as Ordered
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.engine.engine import Engine
from baton.engine.models.decoder import Decoder
from baton.engine.scheduler.sequence import ScheduledChunk
from tests.tiny_models import add, generate, tiny_engine, token_ids, write_config

pytestmark = pytest.mark.usefixtures("ranks_are_forked")

NUM_LAYERS = 5
PROMPT = list(range(1, 22))


class Watch:
    """Copies the pages of the step at every word."""

    def __init__(self, engine: Engine, num_groups: int) -> None:
        self._engine = engine
        self._num_groups = num_groups
        self._pages: list[int] = []
        self.chunks: list[tuple[int, int]] = []
        self.ranges: list[tuple[int, int]] = []
        self.seen: list[Tensor] = []

    def begin(self, chunks: Ordered[ScheduledChunk]) -> int:
        self.chunks += [(chunk.start, chunk.num_tokens) for chunk in chunks]
        self._pages = [page for chunk in chunks for page in chunk.sequence.page_table]
        self.ranges.clear()
        self.seen.clear()
        return self._num_groups

    def layers_written(self, first: int, stop: int) -> None:
        self.ranges.append((first, stop))
        self.seen.append(self.pages())

    def pages(self) -> Tensor:
        return self._engine.runner.pool.device[self._pages].clone()


@pytest.fixture(params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    directory = write_config(tmp_path / "model", num_hidden_layers=NUM_LAYERS)
    return tiny_engine(directory, dtype=request.param, cache={"enable_prefix_caching": False})


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 5, 99])
def test_reported_layers_are_final_and_later_layers_untouched(
    engine: Engine, num_groups: int, native: bool
) -> None:
    expected = token_ids(generate(engine, PROMPT, max_tokens=1))
    if not native:
        assert isinstance(engine.runner.model, Decoder)
        engine.runner.model.stack = None
    with torch.inference_mode():
        engine.runner.pool.device.fill_(float("nan"))
    watch = Watch(engine, num_groups)
    add(engine, "r", PROMPT, max_tokens=1)
    outputs = engine.step(watch)
    assert watch.chunks == [(0, len(PROMPT))] and token_ids(outputs) == expected
    assert watch.ranges[0][0] == 0 and watch.ranges[-1][1] == NUM_LAYERS
    assert [stop for _, stop in watch.ranges[:-1]] == [first for first, _ in watch.ranges[1:]]
    assert len(watch.ranges) == min(num_groups, NUM_LAYERS)
    final = watch.pages()
    for (_, stop), seen in zip(watch.ranges, watch.seen, strict=True):
        assert torch.equal(seen[:, :stop].nan_to_num(), final[:, :stop].nan_to_num())
        assert not seen[0, :stop].isnan().any() and seen[:, stop:].isnan().all()


def test_watch_without_groups_gets_no_report(engine: Engine) -> None:
    watch = Watch(engine, 0)
    add(engine, "r", PROMPT, max_tokens=3)
    outputs = [engine.step(watch) for _ in range(3)]
    assert watch.chunks == [(0, 21), (21, 1), (22, 1)] and watch.ranges == []
    plain = generate(engine, PROMPT, max_tokens=3)
    assert [output.token_id for step in outputs for output in step] == token_ids(plain)


def test_step_without_chunks_is_not_announced(engine: Engine) -> None:
    watch = Watch(engine, 1)
    assert engine.step(watch) == [] and watch.chunks == []


def test_two_ranks_tell_the_same(tmp_path: Path) -> None:
    directory = write_config(tmp_path / "model", num_hidden_layers=NUM_LAYERS)
    with closing(tiny_engine(directory, tensor_parallel_size=2)) as engine:
        watch = Watch(engine, 2)
        add(engine, "r", PROMPT, max_tokens=1)
        engine.step(watch)
        assert watch.ranges == [(0, 2), (2, 5)]
        final = watch.pages()
        for (_, stop), seen in zip(watch.ranges, watch.seen, strict=True):
            assert torch.equal(seen[:, :stop], final[:, :stop])


def test_exception_of_the_watch_fails_the_step(engine: Engine) -> None:
    class Broken(Watch):
        def layers_written(self, first: int, stop: int) -> None:
            raise RuntimeError("the watch is broken")

    add(engine, "r", PROMPT, max_tokens=1)
    with pytest.raises(RuntimeError, match="the watch is broken"):
        engine.step(Broken(engine, 2))
    assert not engine.has_work() and engine.pages.num_free == engine.pages.num_pages
