"""Ranks other than 0: they come up, follow, and never outlive or outwait rank 0."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from multiprocessing import util
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import pytest
import torch

from baton.config.engine import EngineConfig, RankSidecar
from baton.engine.cache.page_pool import mark_of
from baton.engine.engine import Engine, load_engine
from baton.engine.runner.rank_links import RankListener
from baton.engine.runner.rank_process import TpAssignment, TpWorkerProcess
from baton.engine.runner.step_inputs import StepBuilder, encode
from baton.engine.runner.tp_worker import TpWorkers, make_sidecar
from baton.engine.scheduler.sequence import Batch
from baton.errors import ORPHANED, ConfigError, ModelError, WorkerLost
from baton.messages.workers import RankZero
from baton.rpc.connection import RankNetwork
from tests.forked_ranks import forked_ranks
from tests.remote import Remote
from tests.served import is_alive
from tests.tensor_parallel_peer import join_pair
from tests.tiny_models import add, generate, run_to_end, tiny_config, tiny_engine, write_config
from tests.transfer_ends import RING
from tests.waiting import wait_for


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the ranks meet; empty again once they have ended."""
    util.get_temp_dir()  # of multiprocessing, made once: in this folder its sockets' paths would be too long
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def forked() -> Iterator[None]:
    """For tests of ranks that run: a start takes seconds of a core less."""
    with forked_ranks():
        yield


def executable(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_two_ranks_generate_the_tokens_of_one_and_leave_nothing_behind(
    tiny_model: Path,
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The path of the model may be relative. Output of the other rank is no answer: it goes to stderr."""
    monkeypatch.chdir(tiny_model.parent)
    talkative = executable(tmp_path / "talks", f'echo ready; exec {sys.executable} "$@"')
    monkeypatch.setattr(sys, "executable", talkative)
    before = children()
    alone = tiny_engine(tiny_model)
    together = tiny_engine(Path(tiny_model.name), tensor_parallel_size=2)
    for seed, prompt in enumerate(([1], [3, 1, 4, 1, 5, 9, 2, 6], list(range(60)))):
        sampling = {"temperature": 1.0, "seed": seed, "logprobs": 3}
        assert generate(together, prompt, **sampling) == generate(alone, prompt, **sampling)
    assert len(children()) == len(before) + 1
    together.close()
    together.close()  # a second time is no error
    assert children() == before and not list(temporary.iterdir())
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "ready\n")


@pytest.mark.usefixtures("forked")
def test_batch_changes_no_bit_on_four_ranks(tmp_path: Path) -> None:
    directory = write_config(tmp_path / "model", num_attention_heads=4, num_key_value_heads=4)
    prompts = [[1 + number] * (3 + 5 * number) for number in range(4)]
    with closing(tiny_engine(directory, tensor_parallel_size=4)) as engine:
        alone = [generate(engine, prompt, logprobs=2) for prompt in prompts]
        for number, prompt in enumerate(prompts):
            add(engine, str(number), prompt, max_tokens=8, logprobs=2)
        together = run_to_end(engine)
    for number, outputs in enumerate(alone):
        expected = [(output.token_id, output.logprobs) for output in outputs]
        mine = [output for output in together if output.request_id == str(number)]
        assert [(output.token_id, output.logprobs) for output in mine] == expected


@pytest.mark.usefixtures("forked")
def test_step_that_computes_nothing_ends_when_every_rank_has_come_to_its_end(tiny_model: Path) -> None:
    step = StepBuilder(page_size=4, largest_batch=1, max_pages=1).build(Batch())
    with (
        closing(tiny_engine(tiny_model, tensor_parallel_size=2)) as engine,
        ThreadPoolExecutor(1) as thread,
    ):
        early = thread.submit(engine.runner.execute, step)
        assert not wait([early], timeout=0.3).done
        engine.runner.rank.send_command(encode(step))
        assert len(early.result()) == 0


@pytest.mark.usefixtures("forked")
def test_tp_worker_killed_while_serving_is_reported_and_the_engine_still_closes(
    tiny_model: Path, temporary: Path
) -> None:
    before = children()
    engine = tiny_engine(tiny_model, tensor_parallel_size=2)
    (tp_worker,) = set(children()) - set(before)
    tp_worker.kill()
    with pytest.raises(WorkerLost, match="rank 0 of 2 lost a peer|rank 1: the "):
        generate(engine, [1, 2, 3])
    engine.close()
    assert children() == before and not list(temporary.iterdir())


@pytest.mark.usefixtures("forked")
def test_engine_closes_although_a_rank_hangs_with_a_command(
    tiny_model: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next command, which ends the rank, cannot be sent."""
    monkeypatch.setattr("baton.engine.runner.tp_worker.STOP_TIMEOUT_S", 0.5)
    before = children()
    engine = tiny_engine(tiny_model, tensor_parallel_size=2)
    (tp_worker,) = set(children()) - set(before)
    generate(engine, [1, 2, 3])
    wait_for(lambda: tp_worker.status() == psutil.STATUS_SLEEPING)  # until the next command
    tp_worker.suspend()
    engine.runner.rank.send_command(b"no step")
    with ThreadPoolExecutor(1) as thread:
        closed = thread.submit(engine.close)
        is_closed = wait([closed], timeout=30.0).done
        with suppress(psutil.NoSuchProcess):  # ends a close that hangs
            tp_worker.kill()
    assert is_closed
    assert children() == before and not list(temporary.iterdir())


EVICTED: Final = list(range(48))


@pytest.fixture
def evicting(tiny_model: Path, forked: None) -> Iterator[Engine]:
    """Two ranks that have computed EVICTED, of which some pages have gone to the host."""
    num_bytes = 24 * 4 * 256  # 24 pages of 4 tokens on each rank, and on its host
    cache = {"kv_cache_memory_bytes": num_bytes, "host_cache_memory_bytes": num_bytes}
    with closing(tiny_engine(tiny_model, tensor_parallel_size=2, cache=cache)) as engine:
        generate(engine, EVICTED)
        generate(engine, [*range(20, 60), *range(40)])
        yield engine


@pytest.mark.parametrize("pins", [False, True])
def test_error_of_another_rank_is_what_a_step_or_a_pin_raises(evicting: Engine, pins: bool) -> None:
    evicting.runner.rank.send_command(b"no step")
    with pytest.raises(WorkerLost, match="rank 1: .*Error: "):
        if pins:
            evicting.pin(evicting.page_keys(EVICTED, b"", 4), "a peer")
        else:
            generate(evicting, [1, 2, 3])


@pytest.mark.usefixtures("forked")
def test_interrupted_step_leaves_the_ranks_apart_and_the_next_request_fails(
    tiny_model: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = children()
    engine = tiny_engine(tiny_model, tensor_parallel_size=2)
    monkeypatch.setattr(engine.runner, "execute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(engine, [1, 2, 3])
    told = "an interrupt ended a step: the ranks may differ, the engine must be loaded again"
    with pytest.raises(WorkerLost, match=told):
        generate(engine, [1, 2, 3])
    engine.close()
    assert children() == before and not list(temporary.iterdir())


def test_copy_that_fails_leaves_the_ranks_apart_too(
    evicting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no copies today")

    monkeypatch.setattr(evicting.runner, "execute", fail)
    with pytest.raises(RuntimeError, match="no copies today"):
        evicting.pin(evicting.page_keys(EVICTED, b"", 4), "a peer")
    with pytest.raises(WorkerLost, match="the ranks may differ, the engine must be loaded again"):
        generate(evicting, [1, 2, 3])


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 1", "rank [12] ended with status 1"),
        ("exec sleep 600", "rank 1, 2 did not connect within 0.5 s"),
        (
            """read line; case $line in *'"rank":2,'*) exit 1; esac; exec sleep 600""",
            "rank 2 ended with status 1",
        ),
    ],
)
def test_tp_worker_that_does_not_start_is_reported_and_none_is_left(
    tiny_model: Path,
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    message: str,
) -> None:
    before = children()
    monkeypatch.setattr(sys, "executable", executable(tmp_path / "rank", script))
    monkeypatch.setattr("baton.engine.runner.rank_links.START_TIMEOUT_S", 60.0 if "exit" in script else 0.5)
    with pytest.raises(WorkerLost, match=message):
        TpWorkers(tiny_config(tiny_model, tensor_parallel_size=3))
    assert children() == before and not list(temporary.iterdir())


def test_no_process_of_an_engine_is_ended_by_a_dead_nccl_peer(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    script = f"printenv TORCH_NCCL_ASYNC_ERROR_HANDLING > {tmp_path / 'inherited'}; exit 1"
    monkeypatch.setattr(sys, "executable", executable(tmp_path / "rank", script))
    with pytest.raises(WorkerLost, match="rank 1 ended with status 1"):
        tiny_engine(tiny_model, tensor_parallel_size=2)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert (tmp_path / "inherited").read_text() == "0\n"


def test_process_that_cannot_be_started_leaves_no_descriptor_open(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    cache = {"host_cache_memory_bytes": 2**20, "kv_disk_path": str(tmp_path), "kv_disk_bytes": 2**20}
    config = tiny_config(tiny_model, tensor_parallel_size=2, cache=cache)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = psutil.Process().num_fds()
    with pytest.raises(BlockingIOError, match="no more processes"):
        TpWorkers(config)
    assert psutil.Process().num_fds() == before


def test_tp_worker_that_cannot_load_reports_its_error(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = msgspec.structs.replace(
        tiny_config(tiny_model, tensor_parallel_size=2), model=str(tmp_path / "missing")
    )
    tp_workers = TpWorkers(config)
    with (
        pytest.raises(ModelError, match="rank 1: .*missing/config.json: there is no such"),
        tp_workers.explains_loss(),
    ):
        tp_workers.rank.smallest(1)  # what rank 0 asks next
    tp_workers.close(timeout_s=10.0)
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("forked")
def test_tp_worker_without_its_device_reports_its_error(
    tiny_model: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU to have")
    before = children()
    config = tiny_config(tiny_model, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="rank 1: device: expected a CUDA device"):
        TpWorkers(msgspec.structs.replace(config, device="cuda"))
    assert children() == before and not list(temporary.iterdir())


@pytest.mark.usefixtures("forked")
def test_killed_tp_worker_without_an_error_is_worker_lost(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()

    def kill_tp_workers(*_: object) -> None:
        for process in set(children()) - set(before):
            process.kill()

    config = tiny_config(tiny_model, tensor_parallel_size=2)
    with pytest.raises(WorkerLost, match="rank 1: the (peer is gone|connection is closed)"):
        load_engine(config, progress=kill_tp_workers)
    assert children() == before


class RankZeroHost:
    """The engine of two ranks in a process of its own."""

    def __init__(self, model: Path, temporary: Path) -> None:
        tempfile.tempdir = str(temporary)
        self._engine = tiny_engine(model, tensor_parallel_size=2)

    def rank(self) -> int:
        """Return the pid of the other rank."""
        (rank,) = children()
        return rank.pid

    def close(self) -> None:
        self._engine.close()


def test_tp_worker_ends_when_rank_0_is_killed(tiny_model: Path, temporary: Path) -> None:
    with Remote(RankZeroHost, tiny_model, temporary) as rank_0:
        rank = rank_0.rank()
        rank_0.kill()
        wait_for(lambda: not is_alive(rank), 20.0)


# Sidecars of the other ranks: made before their pools, started with them, closed after them.

FACTORY: Final = "tests.recording_sidecar:RecordingSidecar"


@pytest.mark.parametrize("factory", ["", "tests", "tests.nowhere:Nobody", "tests.fakes:Nobody", ":"])
def test_unknown_factory_is_refused(factory: str) -> None:
    with pytest.raises(ConfigError, match="^sidecar: .* cannot be imported"):
        make_sidecar(RankSidecar(factory=factory, arguments=""))


@pytest.mark.usefixtures("forked")
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


def test_single_rank_has_no_sidecar(tiny_model: Path, temporary: Path) -> None:
    sidecar = RankSidecar(factory=FACTORY, arguments=str(temporary))
    load_engine(tiny_config(tiny_model), sidecar=sidecar).close()
    assert not list(temporary.iterdir())


@pytest.mark.usefixtures("forked")
def test_unexpected_error_of_a_rank_is_reported_as_worker_lost(tiny_model: Path) -> None:
    before = children()
    sidecar = RankSidecar(factory="builtins:int", arguments="not a number")
    with pytest.raises(WorkerLost, match="rank 1: ValueError: invalid literal"):
        load_engine(tiny_config(tiny_model, tensor_parallel_size=2), sidecar=sidecar)
    assert children() == before


# Ranks whose starter keeps their stdin open, as the host of ranks on another node does.


@pytest.mark.usefixtures("forked")
def test_rank_that_waits_for_its_welcome_ends_with_its_host(tiny_model: Path, tmp_path: Path) -> None:
    listener, network = meeting_place()
    config = tiny_config(tiny_model, pipeline_parallel_size=2, nnodes=2)
    with (
        closing(listener),
        guarded_rank(config, tmp_path, network=network) as rank,
        closing(listener.admit((1,), 20.0)[1][1]),
    ):
        assert rank.process.stdin is not None
        rank.process.stdin.close()
        assert rank.process.wait(20.0) == ORPHANED


@pytest.mark.usefixtures("forked")
def test_sidecar_hears_lines_from_before_its_start_and_survives_nonsense(
    tiny_model: Path, tmp_path: Path
) -> None:
    listener, network = meeting_place()
    config = tiny_config(tiny_model, tensor_parallel_size=2)
    sidecar = RankSidecar(factory=FACTORY, arguments=str(tmp_path))
    with guarded_rank(config, tmp_path, sidecar=sidecar, network=network) as rank:
        for line in (b"early", b"nonsense"):
            rank.tell(line)
        zero = join_pair(0, tmp_path, network, listener)
        for most in (100, 0, 0):  # pages, host pages, sidecars that have started
            zero.smallest(most)
        for line in (b"nonsense again", b"late"):
            rank.tell(line)
        heard = [f"hears {line}" for line in ("early", "nonsense", "nonsense again", "late")]
        wait_for(lambda: [note for note in notes(tmp_path) if "hears" in note] == heard)
        assert rank.process.stdin is not None
        rank.process.stdin.close()
        assert rank.process.wait(20.0) == ORPHANED
        assert zero.links is not None
        zero.links.close()


def notes(folder: Path) -> list[str]:
    return (folder / "rank").read_text().splitlines()


def meeting_place() -> tuple[RankListener, RankNetwork]:
    """Rank 0's end, and what the other ranks know of it."""
    host, replica = "127.0.0.1", b"replica"
    listener = RankListener(host, RING, replica)
    rank_zero = RankZero(address=listener.address, replica=replica)
    return listener, RankNetwork(rank_zero=rank_zero, own_host=host, keys=RING.generations)


@contextmanager
def guarded_rank(config: EngineConfig, folder: Path, **settings: Any) -> Iterator[TpWorkerProcess]:
    """Rank 1 of two."""
    rank = TpWorkerProcess(
        TpAssignment(
            config=config,
            rank=1,
            rendezvous=str(folder / "store"),
            num_threads=1,
            has_guardian=True,
            **settings,
        )
    )
    try:
        yield rank
    finally:
        rank.close(0.0)
