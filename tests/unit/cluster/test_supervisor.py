import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.clock import SystemClock
from baton.cluster.runtimes.base import ProcessSpec
from baton.cluster.runtimes.local import LocalProcess, LocalRuntime
from baton.cluster.supervisor import (
    FIRST_S,
    LONGEST_S,
    WELL_AFTER_S,
    BackOff,
    Supervised,
)
from baton.errors import WorkerLost
from baton.messages.workers import Address
from tests.event_loop import on_loop
from tests.process_peer import PEER, PeerConfig, spec
from tests.waiting import until

KEY = b"k" * 20
START_S = 30.0  # for the next process


class Watched(LocalRuntime):
    """Records its processes; the next spawn raises the last of `obstacles`."""

    def __init__(self) -> None:
        super().__init__(KEY, command=PEER)
        self.spawned: list[LocalProcess] = []
        self.incarnations: list[int] = []
        self.obstacles: list[Exception] = []

    async def spawn(self, spec: ProcessSpec) -> LocalProcess:
        if self.obstacles:
            raise self.obstacles.pop()
        self.incarnations.append(spec.incarnation)
        self.spawned.append(await super().spawn(spec))
        return self.spawned[-1]


@asynccontextmanager
async def supervised(what: ProcessSpec) -> AsyncIterator[tuple[Supervised, Watched]]:
    runtime = Watched()
    try:
        yield Supervised(what, runtime, SystemClock(), itertools.count(1), START_S), runtime
    finally:
        await runtime.close()


@asynccontextmanager
async def kept(what: ProcessSpec) -> AsyncIterator[tuple[Supervised, Watched]]:
    """Start the process and run `Supervised.keep`; stop the process in the end."""
    async with supervised(what) as (process, runtime):
        await process.start()
        keeping = asyncio.create_task(process.keep())
        yield process, runtime
        await process.stop(1.0)
        await asyncio.wait_for(keeping, 20)


async def until_replaced(process: Supervised, runtime: Watched) -> str:
    """Wait for the second life. Return the end of the first."""
    await until(lambda: len(runtime.spawned) == 2 and process.is_ready, START_S)
    return await asyncio.wait_for(runtime.spawned[0].watch(), 10)


@on_loop
async def test_crashing_process_is_started_again(tmp_path: Path) -> None:
    log = tmp_path / "starts"
    async with kept(spec("falls", config=PeerConfig(log=str(log), num_falls=3))) as (process, runtime):
        await until(lambda: len(runtime.spawned) >= 3 and process.is_ready, START_S)
    assert log.read_text() == "xxx"


@on_loop
async def test_failed_start_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async with kept(spec("serves")) as (process, runtime):
        runtime.obstacles.append(OSError("no process can be made now"))
        runtime.spawned[0].kill()
        await until_replaced(process, runtime)
        assert runtime.incarnations == [1, 3], "a start that failed counts, too"
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [
        "serves ended by SIGKILL; it is started again in 0.2 s",
        "serves did not start: OSError; it is started again in 0.4 s",
    ]


@on_loop
async def test_process_that_cannot_be_watched_is_ended_and_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail_once() -> str:
        monkeypatch.undo()
        raise OSError("the runtime is lost")

    async with supervised(spec("serves")) as (process, runtime):
        await process.start()
        monkeypatch.setattr(runtime.spawned[0], "watch", fail_once)
        keeping = asyncio.create_task(process.keep())
        assert await until_replaced(process, runtime) == "ended by SIGKILL"
        await process.stop(1.0)
        await keeping


@on_loop
async def test_worker_that_hangs_is_killed_and_replaced_on_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cluster.supervisor.MIN_VERDICT_S", 0.0)
    async with kept(spec("serves")) as (process, runtime):
        os.kill(runtime.spawned[0].pid, signal.SIGSTOP)
        process.replace("it was silent for 3 s", 0.0)
        assert await until_replaced(process, runtime) == "ended by SIGKILL"


@on_loop
async def test_verdict_about_an_earlier_process_of_the_name_changes_nothing() -> None:
    async with kept(spec("serves")) as (process, runtime):
        process.replace("it was silent for 3 s", 10.0)
        runtime.spawned[0].kill()
        await until_replaced(process, runtime)
        process.replace("it was silent for 3 s", 10.0)  # given up before the second life
        await asyncio.sleep(0)
        assert process.is_ready and len(runtime.spawned) == 2


@on_loop
async def test_process_whose_loop_is_silent_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cluster.supervisor.HUNG_S", 1.0)
    monkeypatch.setattr("baton.cluster.supervisor.LOOK_S", 0.1)
    async with kept(spec("lives")) as (process, runtime):
        hung = runtime.spawned[0]
        await until(lambda: hung._alive_s is not None)
        os.kill(hung.pid, signal.SIGSTOP)
        assert await until_replaced(process, runtime) == "ended by SIGKILL"


@on_loop
async def test_process_that_is_late_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kept(spec("serves")) as (process, runtime):
        process._start_timeout_s = 0.01
        runtime.spawned[0].kill()
        await until(lambda: len(runtime.spawned) == 2, START_S)
        os.kill(runtime.spawned[1].pid, signal.SIGSTOP)
        assert await asyncio.wait_for(runtime.spawned[1].watch(), 20) == "ended by SIGKILL"
        process._start_timeout_s = START_S
        await until(lambda: process.is_ready, START_S)


@on_loop
async def test_restart_kills_a_process_that_does_not_serve_yet() -> None:
    async with kept(spec("serves")) as (process, runtime):
        runtime.spawned[0].kill()
        await until(lambda: len(runtime.spawned) == 2, START_S)
        os.kill(runtime.spawned[1].pid, signal.SIGSTOP)
        await process.restart(5.0)
        assert await asyncio.wait_for(runtime.spawned[1].watch(), 20) == "ended by SIGKILL"
        await until(lambda: len(runtime.spawned) == 3 and process.is_ready, START_S)


@on_loop
async def test_process_that_is_stopped_while_it_is_made_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(spec("serves")) as (process, runtime):
        spawn, may_go_on = runtime.spawn, asyncio.Event()

        async def slow(what: ProcessSpec) -> LocalProcess:
            await may_go_on.wait()
            return await spawn(what)

        monkeypatch.setattr(runtime, "spawn", slow)
        keeping = asyncio.create_task(process.keep())
        await asyncio.sleep(0)
        await process.stop(1.0)
        may_go_on.set()
        await asyncio.wait_for(keeping, 20)
        assert await asyncio.wait_for(runtime.spawned[0].watch(), 10) == "ended by SIGKILL"


@on_loop
async def test_drained_process_stays_away_until_undrained() -> None:
    async with kept(spec("drains")) as (process, runtime):
        await until(lambda: process.is_drained)
        assert (len(runtime.spawned), process.is_ready) == (1, False)
        process.undrain()
        await until(lambda: len(runtime.spawned) == 2 and process.is_drained)  # this peer drains again


class Life:
    """A process that serves once it may, and ends as a test decides."""

    def __init__(self) -> None:
        self.may_serve = asyncio.Event()
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ready(self) -> Address:
        await self.may_serve.wait()
        return Address("127.0.0.1", 1)

    async def watch(self) -> str:
        return await asyncio.shield(self.end)

    async def silent_s(self) -> float:
        return 0.0

    def stop(self) -> None:
        if not self.end.done():
            self.end.set_result("")


class Lives(LocalRuntime):
    """Its processes are Lives."""

    def __init__(self) -> None:
        super().__init__(KEY)
        self.lives: list[Life] = []

    async def spawn(self, spec: ProcessSpec) -> Any:
        self.lives.append(Life())
        return self.lives[-1]


@asynccontextmanager
async def living(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Supervised, list[Life]]]:
    """Keep a process that is about to serve; stop it in the end."""
    monkeypatch.setattr("baton.cluster.supervisor.FIRST_S", 0.0)
    runtime = Lives()
    process = Supervised(spec("worker"), runtime, SystemClock(), itertools.count(1), START_S)
    keeping = asyncio.create_task(process.keep())
    await until(lambda: len(runtime.lives) == 1)
    yield process, runtime.lives
    await process.stop(1.0)
    await asyncio.wait_for(keeping, 10)


@pytest.mark.parametrize(
    ("orders", "end", "is_started"),
    [
        ([], "ended by SIGKILL", True),
        ([], "", False),  # a router has drained it
        (["drain"], "ended by SIGKILL", False),
        (["undrain"], "", True),
        (["drain", "undrain"], "", True),
        (["drain", "undrain"], "ended by SIGKILL", True),
        (["undrain", "drain"], "", False),
    ],
)
@on_loop
async def test_latest_order_decides_what_follows_the_end_of_a_process(
    monkeypatch: pytest.MonkeyPatch, orders: list[str], end: str, is_started: bool
) -> None:
    async with living(monkeypatch) as (process, lives):
        lives[0].may_serve.set()
        await until(lambda: process.is_ready)
        for order in orders:
            getattr(process, order)()
        lives[0].end.set_result(end)
        await until(lambda: process.is_drained or len(lives) == 2)
        assert process.is_drained is not is_started
        process.undrain()
        process.undrain()
        await until(lambda: len(lives) == 2)
        process.undrain()  # while it starts
        lives[1].may_serve.set()
        await until(lambda: process.is_ready)
        lives[1].end.set_result("")
        await until(lambda: process.is_drained)
        assert len(lives) == 2, "an order counts once"


@on_loop
async def test_restart_lets_a_process_end_in_order_and_starts_it_again() -> None:
    async with kept(spec("serves")) as (process, runtime):
        await process.restart(5.0)
        assert await until_replaced(process, runtime) == ""


@on_loop
async def test_process_that_another_program_has_ended_is_started_again() -> None:
    async with kept(spec("serves")) as (process, runtime):
        os.kill(runtime.spawned[0].pid, signal.SIGTERM)  # it ends in order, with status 0
        assert await until_replaced(process, runtime) == "ended with status 0"


@on_loop
async def test_stopping_ends_a_process_that_ignores_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cluster.supervisor.GRACE_S", 0.0)
    async with supervised(spec("deaf")) as (process, runtime):
        await process.start()
        await process.stop(0.1)
        assert await runtime.spawned[0].watch() == "ended by SIGKILL"


@on_loop
async def test_description_has_the_progress_of_loading() -> None:
    async with supervised(spec("loads")) as (process, _):
        assert await process.describe() == "loads"
        await process.start()
        assert await process.describe() == "loads (75% of 0.0 MB of weights)"


def test_pauses_double_up_to_the_longest() -> None:
    back_off = BackOff()
    pauses = [back_off.after(1.0) for _ in range(8)]
    assert pauses[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert pauses == sorted(pauses)
    assert pauses[-2:] == [LONGEST_S, LONGEST_S]


def test_pause_starts_anew_after_a_long_life() -> None:
    back_off = BackOff()
    for _ in range(5):
        back_off.after(1.0)
    assert back_off.after(WELL_AFTER_S) == FIRST_S
    assert back_off.after(WELL_AFTER_S - 1) == 2 * FIRST_S


@pytest.mark.parametrize("obstacle", [WorkerLost("no room"), OSError("no process can be made now")])
@on_loop
async def test_further_process_is_started_as_often_as_necessary_and_kept(obstacle: Exception) -> None:
    async with supervised(spec("late")) as (process, runtime):
        runtime.obstacles.append(obstacle)
        keeping = asyncio.create_task(process.keep())
        await until(lambda: process.is_ready, START_S)
        await process.stop(1.0)
        await asyncio.wait_for(keeping, 20)
        assert len(runtime.spawned) == 1
