"""The walk in docs/one-request.md names the modules that one request through a P/D pair touches, and no
others.
"""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx2

from baton.bench.clusters import local_cluster
from baton.config.cluster import ServeConfig
from baton.config.router import RouterConfig

WALK: Final = Path(__file__).resolve().parents[2] / "docs" / "one-request.md"
NUM_PROCESSES: Final = 4  # a gateway, a router, a prefill worker, a decode worker
PROMPT: Final = "k231=frog k286=star k399=blue k238=white k260=pink k300=fig k97=pink k94=star\n"
IDLE_S: Final = 2.5  # two heartbeats and a scrape
MAX_LOOKS: Final = 5  # at an idle cluster
SETTLE_S: Final = 0.3


@asynccontextmanager
async def traced_cluster(folder: Path) -> AsyncIterator[str]:
    """Serve the tiny model with one prefill and one decode worker, both recorded; yield the URL."""
    # The policy `prefix` never computes a prompt of this length on the decode worker.
    router = RouterConfig(redis="none", policy="prefix", local_prefill_tokens=0)
    config = ServeConfig(model="tiny", runtime="local", port=0, router=router)
    command = (sys.executable, "-m", "tests.traced_process", str(folder))
    async with local_cluster(config, command) as cluster:
        yield cluster.url


async def stream(url: str, number: int) -> str:
    body = {
        "model": "tiny",
        "prompt": f"{number} {PROMPT}k300?",
        "max_tokens": 6,
        "temperature": 0,
        "stream": True,
    }
    async with httpx2.AsyncClient(timeout=30) as client:
        response = await client.post(f"{url}/v1/completions", json=body)
    events = [
        line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")
    ]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


async def recorded(folder: Path, url: str, numbers: range, idle_s: float = 0.0) -> set[str]:
    """Modules that run in any process while these requests are answered, and for `idle_s` after."""
    (folder / "record").touch()
    await asyncio.sleep(SETTLE_S)
    for number in numbers:
        assert await stream(url, number)
    await asyncio.sleep(idle_s)
    (folder / "record").unlink()
    while len(found := list(folder.glob("*.modules"))) < NUM_PROCESSES:
        await asyncio.sleep(0.02)
    modules = {line for path in found for line in path.read_text().split()}
    for path in found:
        path.unlink()
    return modules


async def trace(folder: Path, walk: set[str]) -> tuple[set[str], set[str]]:
    """The modules of a few requests, and those of a cluster that has nothing to do.

    On a busy machine work that comes at intervals may take more than one look at an idle cluster to show.
    """
    async with traced_cluster(folder) as url, asyncio.timeout(120):
        while await stream(url, 0) == "":  # until the pair has met
            await asyncio.sleep(0.1)
        await asyncio.sleep(IDLE_S)
        # With work that follows at intervals: a router packs what it has recorded at its next tick.
        touched, idle = await recorded(folder, url, range(1, 4), IDLE_S), set[str]()
        for _ in range(MAX_LOOKS):
            idle |= await recorded(folder, url, range(0), IDLE_S)
            if touched - idle <= walk:
                break
        return touched, idle


def test_walk_names_the_modules_of_one_request(tmp_path: Path) -> None:
    walk = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", WALK.read_text(encoding="utf-8")))
    touched, idle = asyncio.run(trace(tmp_path, walk))
    assert "kvtransfer/protocol/source.py" in touched, "the prompt was not transferred"
    assert not walk - touched, f"named in the walk, and not touched: {sorted(walk - touched)}"
    left_out = touched - idle - walk
    assert not left_out, f"touched, and left out of the walk: {sorted(left_out)}"
