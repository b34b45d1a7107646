"""The figures of an engine's steps: times, phases, tokens and padding."""

from pathlib import Path

import pytest

from baton.engine.engine import Engine
from baton.engine.replica import PHASES
from baton.messages.status import Histogram
from tests.tiny_models import add, tiny_engine


@pytest.mark.parametrize("is_async", [False, True])
def test_steps_are_counted_with_their_tokens_and_times(is_async: bool, tiny_model: Path) -> None:
    engine = tiny_engine(tiny_model, scheduler={"async_scheduling": is_async, "max_num_batched_tokens": 16})
    add(engine, "a", list(range(30)), max_tokens=5, ignore_eos=True)
    while engine.has_work():
        engine.step()
    load = engine.load()
    num_steps = load.step_tokens.num
    assert load.step_tokens.sum == 30 + 4, "the last token is sampled and never computed"
    assert load.times["step"].num == num_steps == 2 + 4
    assert load.times["step"].sum > 0


@pytest.mark.parametrize("is_async", [False, True])
def test_phases_of_the_step_after_a_load_are_timed(is_async: bool, tiny_model: Path) -> None:
    """Other processes may interrupt a phase: the forward pass has its part of one of five steps at least."""
    engine = tiny_engine(tiny_model, scheduler={"async_scheduling": is_async})
    for name in "abcdefghijklmnop":  # enough rows that the forward pass is no small part of a step
        add(engine, name, list(range(30)), max_tokens=16, ignore_eos=True)
    engine.step()
    assert not _phases(engine)
    shares = []
    for number in range(1, 6):
        before, before_s = _phases(engine), engine.load().times["step"].sum if not is_async else 0.0
        engine.step()
        engine.step()
        after = _phases(engine)
        assert set(after) == set(PHASES) and all(each.num == number for each in after.values())
        phases_s = {name: each.sum - (before[name].sum if before else 0.0) for name, each in after.items()}
        assert sum(phases_s.values()) <= engine.load().times["step"].sum - before_s + 1e-3
        shares.append(phases_s["forward"] / sum(phases_s.values()))
    assert max(shares) > 0.1


def _phases(engine: Engine) -> dict[str, Histogram]:
    times = engine.load().times
    return {name.removeprefix("step_"): each for name, each in times.items() if name.startswith("step_")}


def test_padding_of_a_static_batch_is_counted(tiny_model: Path) -> None:
    engine = tiny_engine(tiny_model, scheduler={"policy": "static"})
    add(engine, "a", list(range(4)), max_tokens=2, ignore_eos=True)
    add(engine, "b", list(range(10)), max_tokens=2, ignore_eos=True)
    while engine.has_work():
        engine.step()
    assert engine.load().num_padded_tokens == 10 - 4
