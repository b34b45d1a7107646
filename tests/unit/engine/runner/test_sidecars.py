"""Sidecars of an engine's other ranks: made before their pools, started with them, closed after them."""

from pathlib import Path
from typing import Final

import psutil
import pytest

from baton.config.engine import RankSidecar
from baton.engine.cache.page_pool import mark_of
from baton.engine.engine import load_engine
from baton.engine.runner.tp_worker import make_sidecar
from baton.errors import ConfigError, ModelError, WorkerLost
from tests.tiny_models import generate, tiny_config

FACTORY: Final = "tests.recording_sidecar:RecordingSidecar"


@pytest.mark.parametrize("factory", ["", "tests", "tests.nowhere:Nobody", "tests.fakes:Nobody", ":"])
def test_unknown_factory_is_refused(factory: str) -> None:
    with pytest.raises(ConfigError, match="sidecar: there is no"):
        make_sidecar(RankSidecar(factory=factory, arguments=""))


def test_sidecar_gives_the_pools_memory_and_lives_as_long_as_the_steps(
    tiny_model: Path, tmp_path: Path
) -> None:
    sidecar = RankSidecar(factory=FACTORY, arguments=str(tmp_path))
    engine = load_engine(tiny_config(tiny_model, tensor_parallel_size=2), sidecar=sidecar)
    shape = list(engine.runner.pool.device.shape)  # this rank's, cut as the other's
    notes = (tmp_path / "rank").read_text().splitlines()
    assert notes == ["made", f"zeros {shape}", f"start 1 {shape}"]
    assert len(generate(engine, [1, 2, 3])) == 8
    engine.close()
    assert (tmp_path / "rank").read_text().splitlines()[3:] == [
        "close, steps have written: True",
        f"steps have come to mark {engine.runner.steps.launched}",
    ]
    assert engine.runner.steps.launched == mark_of(8)  # a step for each token


def test_sidecar_that_does_not_start_is_reported_to_the_caller(tiny_model: Path, tmp_path: Path) -> None:
    before, folder = psutil.Process().children(), tmp_path / "fails"
    folder.mkdir()
    sidecar = RankSidecar(factory=FACTORY, arguments=str(folder))
    with pytest.raises(ModelError, match="rank 1: this sidecar does not start"):
        load_engine(tiny_config(tiny_model, tensor_parallel_size=2), sidecar=sidecar)
    assert psutil.Process().children() == before


def test_single_rank_has_no_sidecar(tiny_model: Path, tmp_path: Path) -> None:
    sidecar = RankSidecar(factory=FACTORY, arguments=str(tmp_path))
    load_engine(tiny_config(tiny_model), sidecar=sidecar).close()
    assert not list(tmp_path.iterdir())


def test_unexpected_error_of_a_rank_is_reported_as_worker_lost(tiny_model: Path) -> None:
    sidecar = RankSidecar(factory="builtins:int", arguments="not a number")
    with pytest.raises(WorkerLost, match="rank 1: ValueError: invalid literal"):
        load_engine(tiny_config(tiny_model, tensor_parallel_size=2), sidecar=sidecar)
