import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from baton.clock import SystemClock
from baton.cluster.local_runtime import LocalProcess, LocalRuntime
from baton.cluster.process_spec import ProcessSpec
from baton.cluster.supervisor import Supervised
from baton.errors import ConfigError
from tests.peer_processes import PEER, PeerConfig, spec

KEY = b"k" * 20


class Watched(LocalRuntime):
    """Remembers what it has spawned; `obstacles` are in the way of the next."""

    def __init__(self) -> None:
        super().__init__(KEY, command=PEER)
        self.spawned: list[LocalProcess] = []
        self.obstacles: list[Exception] = []

    async def spawn(self, spec: ProcessSpec) -> LocalProcess:
        if self.obstacles:
            raise self.obstacles.pop()
        self.spawned.append(await super().spawn(spec))
        return self.spawned[-1]


def supervised(what: ProcessSpec, test: Callable[[Supervised, Watched], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        runtime = Watched()
        try:
            await test(Supervised(what, runtime, SystemClock()), runtime)
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

    supervised(spec("serves"), test)


def test_what_has_drained_stays_away() -> None:
    async def test(process: Supervised, runtime: Watched) -> None:
        await process.start()
        await asyncio.wait_for(process.keep(), 10)
        assert (len(runtime.spawned), process.is_ready) == (1, False)

    supervised(spec("drains"), test)


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
