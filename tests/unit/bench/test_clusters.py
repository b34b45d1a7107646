"""A watched cluster, before routers whose answers are scripted."""

import subprocess
import sys
from typing import cast

from baton.bench.clusters import WatchedCluster
from baton.cluster.operator_node import Operator
from tests.event_loop import on_loop


class EndedWorker(WatchedCluster):
    """Its routers still list a worker that has ended."""

    async def pids(self) -> dict[str, int]:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        return {"decode-0": ended.pid}


@on_loop
async def test_worker_that_has_just_ended_cannot_be_killed() -> None:
    assert not await EndedWorker("http://h", cast(Operator, None), num_processes=1).kill("decode-0")
