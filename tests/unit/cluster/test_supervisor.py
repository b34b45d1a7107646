import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from baton.clock import SystemClock
from baton.cluster.process_spec import ProcessSpec
from baton.cluster.runtimes.local import LocalProcess, LocalRuntime
from baton.cluster.supervisor import Supervised
from baton.errors import ConfigError
from tests.peer_processes import PEER, PeerConfig, spec

KEY = b"k" * 20


class Watched(LocalRuntime):
    """Remembers what it has spawned; `obstacles` are in the way of the next."""

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


def supervised(what: ProcessSpec, test: Callable[[Supervised, Watched], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        runtime = Watched()
        try:
            await test(Supervised(what, runtime, SystemClock(), itertools.count(1)), runtime)
        finally:
            await runtime.close()

    asyncio.run(run())


def test_what_ends_by_itself_is_started_again(tmp_path: Path) -> None:
    log = tmp_path / "starts"

    async def test(process: Supervised, runtime: Watched) -> None:
        await process.start()
        keeping = asyncio.create_task(process.keep())
        async with asyncio.timeout(20):
            while process.num_restarts < 2 or not process.is_ready:
                await asyncio.sleep(0.01)
        await process.stop(1.0)
        await keeping
        assert log.read_text() == "xxx"

    supervised(spec("falls", config=PeerConfig(log=str(log), num_falls=3)), test)


def test_what_could_not_be_started_again_is_tried_once_more() -> None:
    async def test(process: Supervised, runtime: Watched) -> None:
        await process.start()
        keeping = asyncio.create_task(process.keep())
        runtime.obstacles.append(OSError("no process can be made now"))
        runtime.spawned[0].kill()
        async with asyncio.timeout(20):
            while len(runtime.spawned) < 2 or not process.is_ready:
                await asyncio.sleep(0.01)
        await process.stop(1.0)
        await keeping
        assert process.num_restarts == 2
        assert runtime.incarnations == [1, 3], "a start that failed counts, too"

    supervised(spec("serves"), test)


def test_process_that_cannot_be_watched_is_ended_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail_once() -> str:
        monkeypatch.undo()
        raise OSError("the runtime is lost")

    async def test(process: Supervised, runtime: Watched) -> None:
        await process.start()
        first = runtime.spawned[0]
        monkeypatch.setattr(first, "watch", fail_once)
        keeping = asyncio.create_task(process.keep())
        await until(lambda: len(runtime.spawned) == 2 and process.is_ready)
        assert await asyncio.wait_for(first.watch(), 10) == "ended by SIGKILL"
        await process.stop(1.0)
        await keeping

    supervised(spec("serves"), test)


def test_what_has_drained_stays_away() -> None:
    async def test(process: Supervised, runtime: Watched) -> None:
        await process.start()
        await asyncio.wait_for(process.keep(), 10)
        assert (len(runtime.spawned), process.is_ready) == (1, False)

    supervised(spec("drains"), test)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def test_worker_that_hangs_is_killed_and_replaced_on_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cluster.supervisor.MIN_VERDICT_S", 0.0)

    async def test(process: Supervised, runtime: Watched) -> None:
        await process.start()
        keeping = asyncio.create_task(process.keep())
        hung = runtime.spawned[0]
        os.kill(hung.pid, signal.SIGSTOP)
        process.replace("it was silent for 3 s", 0.0)
        await until(lambda: len(runtime.spawned) == 2 and process.is_ready)
        assert await asyncio.wait_for(hung.watch(), 10) == "ended by SIGKILL"
        await process.stop(1.0)
        await keeping

    supervised(spec("serves"), test)


def test_verdict_about_an_earlier_process_of_the_name_changes_nothing() -> None:
    async def test(process: Supervised, runtime: Watched) -> None:
        await process.start()
        keeping = asyncio.create_task(process.keep())
        process.replace("it was silent for 3 s", 10.0)
        runtime.spawned[0].kill()
        await until(lambda: len(runtime.spawned) == 2 and process.is_ready)
        process.replace("it was silent for 3 s", 10.0)  # given up before this one started
        await asyncio.sleep(0)
        assert process.is_ready and len(runtime.spawned) == 2
        await process.stop(1.0)
        await keeping
        assert await runtime.spawned[1].watch() == ""  # SIGTERM ended it, in order

    supervised(spec("serves"), test)


def test_process_whose_loop_is_silent_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cluster.supervisor.HUNG_S", 1.0)
    monkeypatch.setattr("baton.cluster.supervisor.LOOK_S", 0.1)

    async def test(process: Supervised, runtime: Watched) -> None:
        await process.start()
        keeping = asyncio.create_task(process.keep())
        hung = runtime.spawned[0]
        await until(lambda: hung._alive_s is not None)
        os.kill(hung.pid, signal.SIGSTOP)
        await until(lambda: len(runtime.spawned) == 2 and process.is_ready)
        assert await asyncio.wait_for(hung.watch(), 10) == "ended by SIGKILL"
        await process.stop(1.0)
        await keeping

    supervised(spec("lives"), test)


def test_drained_process_comes_back_when_it_is_recalled() -> None:
    async def test(process: Supervised, runtime: Watched) -> None:
        await process.start()
        await asyncio.wait_for(process.keep(), 10)
        assert process.is_away
        await asyncio.wait_for(process.recall(), 20)  # which keeps it: this peer drains again
        assert (len(runtime.spawned), process.is_away) == (2, True)

    supervised(spec("drains"), test)


def test_process_that_still_drains_comes_back_when_it_was_recalled() -> None:
    async def test(process: Supervised, runtime: Watched) -> None:
        await process.start()
        keeping = asyncio.create_task(process.keep())
        await process.recall()
        os.kill(runtime.spawned[0].pid, signal.SIGUSR1)
        await until(lambda: len(runtime.spawned) == 2 and process.is_ready)
        os.kill(runtime.spawned[1].pid, signal.SIGUSR1)
        await asyncio.wait_for(keeping, 10)  # recalled once, it stays away now
        assert process.is_away

    supervised(spec("drains-later"), test)


def test_restart_lets_a_process_end_in_order_and_starts_it_again() -> None:
    async def test(process: Supervised, runtime: Watched) -> None:
        await process.start()
        keeping = asyncio.create_task(process.keep())
        await process.restart(5.0)
        await until(lambda: len(runtime.spawned) == 2 and process.is_ready)
        assert await runtime.spawned[0].watch() == ""
        await process.stop(1.0)
        await keeping

    supervised(spec("serves"), test)


def test_each_failed_start_is_told_once_with_what_follows(caplog: pytest.LogCaptureFixture) -> None:
    async def test(process: Supervised, runtime: Watched) -> None:
        await process.start()
        keeping = asyncio.create_task(process.keep())
        runtime.obstacles.append(OSError("no process can be made now"))
        runtime.spawned[0].kill()
        await until(lambda: len(runtime.spawned) == 2 and process.is_ready)
        await process.stop(1.0)
        await keeping

    supervised(spec("serves"), test)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [
        "serves ended by SIGKILL; it is started again in 0.2 s",
        "serves did not start: OSError; it is started again in 0.4 s",
    ]


def test_what_somebody_elses_sigterm_has_ended_is_started_again() -> None:
    async def test(process: Supervised, runtime: Watched) -> None:
        await process.start()
        keeping = asyncio.create_task(process.keep())
        os.kill(runtime.spawned[0].pid, signal.SIGTERM)  # it ends in order, with status 0
        async with asyncio.timeout(20):
            while not process.num_restarts or not process.is_ready:
                await asyncio.sleep(0.01)
        assert await runtime.spawned[0].watch() == "ended with status 0"
        await process.stop(1.0)
        await keeping

    supervised(spec("serves"), test)


def test_stopping_ends_one_that_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cluster.supervisor.GRACE_S", 0.0)

    async def test(process: Supervised, runtime: Watched) -> None:
        await process.start()
        await process.stop(0.1)
        assert await runtime.spawned[0].watch() == "ended by SIGKILL"
        with pytest.raises(ProcessLookupError):
            os.kill(runtime.spawned[0].pid, 0)

    supervised(spec("deaf"), test)


def test_what_loads_says_how_far_it_is() -> None:
    async def test(process: Supervised, runtime: Watched) -> None:
        assert await process.describe() == "loads"
        await process.start()
        assert await process.describe() == "loads (75% of 0.0 MB of weights)"

    supervised(spec("loads"), test)


def test_a_first_start_that_fails_is_told_to_the_caller() -> None:
    async def test(process: Supervised, runtime: Watched) -> None:
        with pytest.raises(ConfigError, match="the model is nowhere"):
            await process.start()

    supervised(spec("fails"), test)
