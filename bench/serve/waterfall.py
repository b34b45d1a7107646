"""The share of requests' time that their timelines leave unaccounted, under load and with killed workers.

A real cluster of the model tiny, once with one prefill and one decode worker, once with two of each. Clients
stream and ask for whole answers, with shared and with new prompts, with and without a stop string, one after
the other each; meanwhile `--kills` workers are killed. The timeline of every request is read from
`/admin/requests` and compared with the client's own time of the request.
"""

import asyncio
import json
import random
import re
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final

import msgspec

from baton.bench.clusters import WatchedCluster, served_cluster
from baton.bench.report import Report, Row, at_least, at_most, option, percentile, suite
from baton.bench.serve.client import Address, Answer, Client
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


def id_of(body: bytes) -> str:
    """Return the request's id in an answer, whole or streamed."""
    found = ID.search(body)
    assert found is not None, body[:200]
    return found[1].decode()


class Checked:
    """Requests to a cluster, their timelines, and the workers that are killed meanwhile."""

    def __init__(self, cluster: WatchedCluster, num_requests: int, seed: int) -> None:
        self.taken_s: dict[str, float] = {}  # request id -> the seconds that an answer took, by its client
        self.timelines: dict[str, RequestTimeline] = {}  # by request id
        self.num_failures = self.num_kills = 0
        self._cluster, self._seed = cluster, seed
        self._num_requests = self._left = num_requests

    @property
    def pairs(self) -> list[tuple[float, RequestTimeline]]:
        """The client's seconds and the timeline of each request that has both."""
        both = self.taken_s.keys() & self.timelines.keys()
        return [(self.taken_s[each], self.timelines[each]) for each in both]

    async def run(self, num_clients: int, num_kills: int) -> None:
        """Have clients ask one request after the other until none is left, while workers are killed."""
        rng = random.Random(self._seed)
        with closing(Client(Address(self._cluster.url))) as client:
            watching = [asyncio.create_task(each) for each in (self._read(client), self._kill(num_kills))]
            await asyncio.gather(*(self._ask(client, rng) for _ in range(num_clients)))
            await asyncio.sleep(2 * POLL_S)
            for task in watching:
                task.cancel()
            for ended in await asyncio.gather(*watching, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended

    async def _ask(self, client: Client, rng: random.Random) -> None:
        while self._left > 0:
            self._left -= 1
            body, began_s = json.dumps(body_of(rng)).encode(), time.perf_counter()
            try:
                answer = await client.post("/v1/completions", body)
            except PeerGone:
                answer = Answer()
            if answer.status == 200:
                self.taken_s[id_of(answer.body)] = time.perf_counter() - began_s
            else:
                self.num_failures += 1
                await asyncio.sleep(POLL_S / 2)

    async def _read(self, client: Client) -> None:
        """Read the latest timelines, whole, until cancelled."""
        while True:
            listed = json.loads((await client.get("/admin/requests?limit=100")).body)
            for request_id in {each["request_id"] for each in listed["data"]} - self.timelines.keys():
                answer = await client.get(f"/admin/requests/{request_id}")
                if answer.status == 200:
                    self.timelines[request_id] = timeline_of(answer.body)
            await asyncio.sleep(POLL_S)

    async def _kill(self, num_kills: int) -> None:
        """Kill workers of any role, spread evenly over the requests."""
        rng = random.Random(self._seed)
        while self.num_kills < num_kills:
            await asyncio.sleep(POLL_S)
            if 1 - self._left / self._num_requests < (self.num_kills + 1) / (num_kills + 1):
                continue
            pids = await self._cluster.pids()
            names = sorted(name for name in pids if name.startswith(("decode-", "prefill-")))
            self.num_kills += bool(names) and await self._cluster.kill(rng.choice(names))


def rows_of(name: str, checked: Checked) -> list[Row]:
    """Return the figures of one cluster."""
    pairs = checked.pairs
    if not pairs:
        return [Row(f"{name}: requests", None, "", met=False, note="no request has a timeline")]
    shares = [timeline.unaccounted_s / timeline.total_s for _, timeline in pairs]
    off_s = [abs(sum(timeline.seconds.values()) - timeline.total_s) for _, timeline in pairs]
    apart_ms = [1e3 * abs(taken_s - timeline.total_s) for taken_s, timeline in pairs]
    replayed = [t for _, t in pairs if "replayed" in t.seconds]
    errors_us = [1e6 * timeline.clock_error_s for _, timeline in pairs]
    known = len(pairs) / max(1, len(checked.taken_s))
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
        async with served_cluster(OPTIONS, prefill=size, decode=size) as cluster:
            report.tell(f"{name} under load")
            checked = Checked(cluster, options.requests // 2, options.seed)
            await checked.run(options.clients, options.kills)
        report.rows += rows_of(name, checked)
        report.extra[name] = _parts_of([timeline for _, timeline in checked.pairs])


def _parts_of(timelines: Sequence[RequestTimeline]) -> dict[str, float]:
    """Return the share of each part in the time of all requests."""
    total_s, sums = sum(timeline.total_s for timeline in timelines) or 1.0, defaultdict[str, float](float)
    for timeline in timelines:
        for part, seconds in timeline.seconds.items():
            sums[part] += seconds / total_s
    return sums
