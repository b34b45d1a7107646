"""The share of requests' time that their timelines leave unaccounted, under load and with killed workers.

    python -m baton.bench.serve.waterfall [--requests 10000] [--clients 12] [--kills 10] [--output
    FOLDER]

A real cluster of the model tiny, once with one prefill and one decode worker, once with two of each. Clients
stream and ask for whole answers, with shared and with new prompts, with and without a stop string, one after
the other each; meanwhile `--kills` workers are killed. The timeline of every request is read from
`/admin/requests` and compared with the client's own time of the request.
"""

import asyncio
import json
import os
import random
import re
import signal
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from baton.bench.clusters import WatchedCluster, served_cluster
from baton.bench.report import Report, Row, at_least, at_most, option, percentile, suite
from baton.bench.serve.client import Address, Client
from baton.errors import PeerGone
from baton.messages.timeline import RequestTimeline

POLL_S: Final = 0.2  # the gateway keeps its last 1,024 requests
UNACCOUNTED_BAR: Final = 0.02
SUM_BAR_S: Final = 1e-6
DISAGREE_BAR_MS: Final = 20.0  # of the client, which shares the machine, and the gateway about the whole time
ID: Final = re.compile(rb'"id":"[a-z]+-([0-9a-f]{32})"')
KNOWN_BAR: Final = 0.99
VOCABULARY: Final = 200
MAX_NEW: Final = 48
OPTIONS: Final = ("--runtime", "local", "--router-policy", "cost", "--kv-cache-memory", "64MiB")


class Asked(NamedTuple):
    """One answered request as its client saw it."""

    request_id: str
    taken_s: float


class Checked(NamedTuple):
    """The clients' view and the timelines, by request id."""

    asked: dict[str, Asked]
    timelines: dict[str, RequestTimeline]
    num_failures: int
    num_kills: int

    def both(self) -> Iterator[tuple[Asked, RequestTimeline]]:
        """Yield the requests that have both."""
        for request_id, asked in self.asked.items():
            if request_id in self.timelines:
                yield asked, self.timelines[request_id]


class TimelineReader:
    """Reads new timelines of a cluster until it is cancelled."""

    def __init__(self, url: str) -> None:
        self.timelines: dict[str, RequestTimeline] = {}
        self._client = Client(Address(url))

    async def run(self) -> None:
        """Read every POLL_S."""
        with closing(self._client):
            while True:
                await self.read()
                await asyncio.sleep(POLL_S)

    async def read(self) -> None:
        """Read the latest timelines, whole."""
        listed = json.loads((await self._client.get("/admin/requests?limit=100")).body)
        for summary in listed["data"]:
            request_id = summary["request_id"]
            if request_id not in self.timelines:
                answer = await self._client.get(f"/admin/requests/{request_id}")
                if answer.status == 200:
                    self.timelines[request_id] = timeline_of(answer.body)


def timeline_of(body: bytes) -> RequestTimeline:
    """Return the timeline of an answer of `/admin/requests/ID`."""
    fields = json.loads(body)
    del fields["seconds"]
    return msgspec.convert(fields, RequestTimeline)


def body_of(rng: random.Random) -> dict[str, Any]:
    """Return the body of a random request."""
    shared = [1 + 7 * index % VOCABULARY for index in range(rng.choice((0, 64, 256)))]
    own = [rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(8, 300))]
    body: dict[str, Any] = {"model": "tiny", "prompt": shared + own, "max_tokens": rng.randrange(1, MAX_NEW)}
    body |= {"temperature": rng.choice((0.0, 1.0)), "ignore_eos": True, "stream": rng.random() < 0.5}
    if rng.random() < 0.1:
        body["stop"] = ["a"]
    if rng.random() < 0.05:
        body["n"] = 2
        body["temperature"] = 1.0
    return body


class Clients:
    """Clients that ask one request after the other."""

    def __init__(self, url: str, num_requests: int, seed: int) -> None:
        self.asked: dict[str, Asked] = {}
        self.num_failures = 0
        self._url = url
        self._num_requests = self._left = num_requests
        self._rng = random.Random(seed)

    @property
    def share_sent(self) -> float:
        """The part of the requests that has been sent."""
        return 1.0 - self._left / self._num_requests

    async def run(self) -> None:
        """Ask until no request is left."""
        with closing(Client(Address(self._url))) as client:
            while self._left > 0:
                self._left -= 1
                await self._ask(client)

    async def _ask(self, client: Client) -> None:
        body, began_s = json.dumps(body_of(self._rng)).encode(), time.perf_counter()
        try:
            answer = await client.post("/v1/completions", body)
        except PeerGone:
            self.num_failures += 1
            return
        if answer.status != 200:
            self.num_failures += 1
            await asyncio.sleep(0.1)
            return
        request_id = id_of(answer.body)
        self.asked[request_id] = Asked(request_id, time.perf_counter() - began_s)


def id_of(body: bytes) -> str:
    """Return the request's id in an answer, whole or streamed."""
    found = ID.search(body)
    assert found is not None, body[:200]
    return found[1].decode()


async def kill_workers(cluster: WatchedCluster, clients: Clients, num_kills: int, rng: random.Random) -> int:
    """Kill workers of any role, spread evenly over the requests, until cancelled; return how many."""
    num_killed = 0
    with suppress(asyncio.CancelledError):
        while num_killed < num_kills:
            await asyncio.sleep(POLL_S)
            if clients.share_sent < (num_killed + 1) / (num_kills + 1):
                continue
            pids = await cluster.pids()
            names = sorted(name for name in pids if name.startswith(("decode-", "prefill-")))
            if names:
                os.kill(pids[rng.choice(names)], signal.SIGKILL)
                num_killed += 1
    return num_killed


async def check(
    cluster: WatchedCluster, num_requests: int, num_clients: int, num_kills: int, seed: int
) -> Checked:
    """Load a cluster, with kills, and return what the clients and the timelines say."""
    reader, clients = TimelineReader(cluster.url), Clients(cluster.url, num_requests, seed)
    reading = asyncio.create_task(reader.run())
    killing = asyncio.create_task(kill_workers(cluster, clients, num_kills, random.Random(seed)))
    try:
        await asyncio.gather(*(clients.run() for _ in range(num_clients)))
        await asyncio.sleep(2 * POLL_S)
    finally:
        reading.cancel()
        killing.cancel()
        with suppress(asyncio.CancelledError):
            await reading
    return Checked(clients.asked, reader.timelines, clients.num_failures, await killing)


def rows_of(name: str, checked: Checked) -> list[Row]:
    """Return the figures of one cluster."""
    pairs = list(checked.both())
    if not pairs:
        return [Row(f"{name}: requests", None, "", met=False, note="no request has a timeline")]
    shares = [timeline.unaccounted_s / timeline.total_s for _, timeline in pairs]
    off_s = [abs(sum(timeline.seconds.values()) - timeline.total_s) for _, timeline in pairs]
    apart_ms = [1e3 * abs(asked.taken_s - timeline.total_s) for asked, timeline in pairs]
    replayed = [t for _, t in pairs if "replayed" in t.seconds]
    errors_us = [1e6 * timeline.clock_error_s for _, timeline in pairs]
    known = len(pairs) / max(1, len(checked.asked))
    note = f"{len(pairs):,} requests, {checked.num_kills} kills, {len(replayed)} replayed"
    note += f", {checked.num_failures} failed; p50 {percentile(shares, 50):.3%}, worst {max(shares):.2%}"
    return [
        at_most(f"{name}: unaccounted, p99", percentile(shares, 99), "of 1", UNACCOUNTED_BAR, note),
        at_most(f"{name}: parts and unaccounted against the whole, worst", max(off_s), "s", SUM_BAR_S),
        at_most(
            f"{name}: client's time less the timeline's, p50",
            percentile(apart_ms, 50),
            "ms",
            DISAGREE_BAR_MS,
            f"p99 {percentile(apart_ms, 99):.1f} ms; other programs of the machine delay the client",
        ),
        at_least(f"{name}: answered requests with a timeline", known, "of 1", KNOWN_BAR),
        Row(f"{name}: bound of the clocks' error, p50", percentile(errors_us, 50), "us"),
    ]


@suite(
    "waterfall",
    "Timelines of requests: the time that nothing accounts for",
    option("--requests", 10_000, "over both clusters"),
    option("--clients", 12, "at once"),
    option("--kills", 10, "of workers, in each cluster"),
    option("--seed", 1, "of requests and kills"),
    fails_on_miss=True,
)
async def measure(options: Namespace, report: Report) -> None:
    """Measure both clusters."""
    for size in (1, 2):
        name = f"{size}P{size}D"
        report.tell(f"{name} starts")
        with tempfile.TemporaryDirectory() as folder:
            async with served_cluster(Path(folder), OPTIONS, prefill=size, decode=size) as cluster:
                report.tell(f"{name} under load")
                checked = await check(
                    cluster, options.requests // 2, options.clients, options.kills, options.seed
                )
        report.rows += rows_of(name, checked)
        report.extra[name] = _parts_of([timeline for _, timeline in checked.both()])


def _parts_of(timelines: Sequence[RequestTimeline]) -> dict[str, float]:
    """Return the share of each part in the time of all requests."""
    total_s = sum(timeline.total_s for timeline in timelines) or 1.0
    sums: dict[str, float] = {}
    for timeline in timelines:
        for part, seconds in timeline.seconds.items():
            sums[part] = sums.get(part, 0.0) + seconds / total_s
    return sums


if __name__ == "__main__":
    measure.main(__doc__)
