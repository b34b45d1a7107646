"""Migrations and flips under load: the gap in a client's stream, its tokens, and the seconds of a flip.

A real cluster of the model tiny with one prefill and two decode workers on loopback. A client streams a
sampled answer after a prompt of 2,000 or 8,000 tokens, while the stream moves to and fro. The gap of a move
is the longest time between two pieces of the answer from the order until it is carried out, less the stream's
median time between two pieces; the same windows without a move have the gaps of the machine alone.
The tokens are compared with those of the same request without moves.

Then a decode worker flips: it becomes a prefill worker and a decode worker again, while four clients stream.
"""

import asyncio
import json
import tempfile
import time
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

from baton.bench.clusters import WatchedCluster, copy_tiny, served_cluster
from baton.bench.report import Report, Row, at_most, option, percentile, suite
from baton.bench.serve.client import Address, Answer, Connection
from baton.bench.serve.figures import token_ids_of
from baton.errors import PeerGone
from baton.messages.workers import WorkerRole

BARS_MS: Final = {2_000: 60.0, 8_000: 150.0}  # of the gap, by tokens of context
MAX_CONTEXT: Final = 16_384

PAUSE_S: Final = 0.3  # between two moves
FLIP_BAR_S: Final = 2.0
NUM_FLIP_CLIENTS: Final = 4
OPTIONS: Final = ("--runtime", "local", "--kv-cache-memory", "256MiB", "--drain-timeout", "5")


class Moved(NamedTuple):
    """A stream that has moved, by its pieces."""

    gaps_s: list[float]  # of each move
    quiet_gaps_s: list[float]  # of as many windows of the same length without a move
    itl_s: float
    token_ids: list[int]


def gap_s(times_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """Return the longest time between neighbouring pieces, from the pair at begin_s to that at end_s."""
    first, last = bisect_left(times_s, begin_s), bisect_left(times_s, end_s) + 1
    return max((b - a for a, b in pairwise(times_s[max(0, first - 1) : last + 1])), default=0.0)


async def move(cluster: WatchedCluster, body: dict[str, Any], num_moves: int) -> Moved:
    """Stream an answer and move it `num_moves` times."""
    address = Address(cluster.url)
    connection = await Connection.open(address)
    windows: list[tuple[float, float]] = []
    with closing(connection):
        request = address.post("/v1/completions", json.dumps(body).encode())
        ends: list[Answer | PeerGone] = []
        answer = connection.send(request, ends.append)
        while len(answer.pieces) < 3 and not ends:
            await asyncio.sleep(0.01)
        for number in range(2 * num_moves):
            if not ends:
                windows.append(await _window(cluster, is_quiet=not number % 2, before=windows))
                await asyncio.sleep(PAUSE_S)
        while not ends:
            await asyncio.sleep(0.01)
        assert isinstance(ends[0], Answer), ends[0]
    times_s = [at_s for at_s, _ in answer.pieces]
    gaps_s = [gap_s(times_s, *window) for window in windows]
    itl_s = percentile([b - a for a, b in pairwise(times_s[2:])], 50)
    token_ids = token_ids_of(answer)
    assert len(token_ids) == body["max_tokens"], f"{len(token_ids)} tokens came"
    return Moved(gaps_s[1::2], gaps_s[::2], itl_s, token_ids)


async def _window(
    cluster: WatchedCluster, *, is_quiet: bool, before: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Move the stream, or wait as long as the last move took; return the begin and the end."""
    begin_s = time.perf_counter()
    if is_quiet:
        await asyncio.sleep(before[-1][1] - before[-1][0] if before else PAUSE_S)
    else:
        for name in ("decode-0", "decode-1"):
            if await cluster.migrate(name):
                break
        else:
            raise AssertionError("no worker has the stream")
    return begin_s, time.perf_counter()


async def flip(cluster: WatchedCluster, num_tokens: int, num_flips: int) -> list[Row]:
    """Flip a worker to and fro while clients stream."""
    bodies = [stream_body(2 + 300 * number, num_tokens, seed=number) for number in range(NUM_FLIP_CLIENTS)]
    alone = [await move(cluster, body, 0) for body in bodies]
    streams = [asyncio.create_task(move(cluster, body, 0)) for body in bodies]
    taken_s: dict[WorkerRole, list[float]] = {WorkerRole.PREFILL: [], WorkerRole.DECODE: []}
    for _ in range(num_flips):
        for role, seconds in taken_s.items():
            await asyncio.sleep(PAUSE_S)
            seconds.append(await cluster.flip("decode-1", role))
    num_running = sum(not stream.done() for stream in streams)
    pairs = zip([await stream for stream in streams], alone, strict=True)
    num_other = sum(a.token_ids != b.token_ids for a, b in pairs)
    rows = [
        at_most(
            f"a decode worker becomes a {role} worker"
            if role is WorkerRole.PREFILL
            else "and a decode worker again",
            percentile(seconds, 50),
            "s",
            FLIP_BAR_S,
            f"{len(seconds)} flips, most {max(seconds):.2f} s; "
            f"{num_running} of {NUM_FLIP_CLIENTS} streams ran until the last flip",
        )
        for role, seconds in taken_s.items()
    ]
    return [
        *rows,
        at_most("streams under flips: answers that differ", num_other, f"of {NUM_FLIP_CLIENTS}", 0.0),
    ]


def stream_body(num_prompt_tokens: int, num_tokens: int, seed: int) -> dict[str, Any]:
    """Return the body of a sampled, streamed request with token ids."""
    prompt = [2 + 7 * index % 1000 for index in range(num_prompt_tokens)]
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "stream": True}
    return body | {"temperature": 1.0, "seed": seed, "ignore_eos": True, "return_token_ids": True}


def rows_of(num_tokens: int, moved: Moved, alone: list[int]) -> list[Row]:
    """Return the figures of one length of context."""
    over_ms = [1e3 * max(0.0, gap - moved.itl_s) for gap in moved.gaps_s]
    quiet_ms = [1e3 * max(0.0, gap - moved.itl_s) for gap in moved.quiet_gaps_s]
    note = (
        f"{len(over_ms)} moves; p90 {percentile(over_ms, 90):.1f}, most {max(over_ms):.1f} ms; without a "
        f"move p50 {percentile(quiet_ms, 50):.1f}, most {max(quiet_ms):.1f} ms; "
        f"ITL {1e3 * moved.itl_s:.1f} ms"
    )
    name = f"{num_tokens:,} tokens of context"
    num_other = sum(a != b for a, b in zip_longest(moved.token_ids, alone))
    return [
        at_most(
            f"{name}: gap of a move over the ITL, p50",
            percentile(over_ms, 50),
            "ms",
            BARS_MS[num_tokens],
            note,
        ),
        at_most(f"{name}: differing tokens", num_other, f"of {len(alone)}", 0.0),
    ]


@suite(
    "migration",
    "Streams that move to another decode worker: what their clients see",
    option("--moves", 20, "of the stream, at each length"),
    option("--flips", 3, "to and fro"),
    option("--tokens", 4_000, "of the answer"),
    fails_on_miss=True,
)
async def measure(options: Namespace, report: Report) -> None:
    """Measure the lengths of context, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(copy_tiny(Path(folder) / "tiny", MAX_CONTEXT))
        names = ("--served-model-name", "tiny")
        async with served_cluster((*OPTIONS, *names), prefill=1, model=model) as cluster:
            for num_tokens in BARS_MS:
                body = stream_body(num_tokens, options.tokens, seed=7)
                report.tell(f"{num_tokens} tokens: without moves")
                alone = await move(cluster, body, 0)
                report.tell(f"{num_tokens} tokens: with moves")
                report.rows += rows_of(num_tokens, await move(cluster, body, options.moves), alone.token_ids)
            report.tell("flips")
            report.rows += await flip(cluster, options.tokens, options.flips)
