"""The cluster of bench/faults/soak.py, as a user starts it, and its processes by their names."""

import asyncio
import contextlib
import json
import random
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from baton.bench.serve.client import Address, Answer, Connection
from baton.bench.tenants.real_world import tenants_yaml
from baton.cluster.cluster_record import find_record
from baton.cluster.offline.llm import LLM
from baton.cluster.operator_node import Operator, connected
from baton.config.environment import environment_of_child
from baton.errors import PeerGone, WorkerLost
from baton.messages.operations import Status
from baton.request import SamplingParams

MODEL: Final = "tiny"
TENANTS: Final = ("red", "green", "blue")
NUM_PREFILL, NUM_DECODE, NUM_GATEWAYS, NUM_ROUTERS = 2, 2, 2, 2
NUM_PROCESSES: Final = NUM_PREFILL + NUM_DECODE + NUM_GATEWAYS + NUM_ROUTERS
START_S: Final = 180.0
STOP_S: Final = 60.0
LOOK_S: Final = 0.2
BANNER: Final = re.compile(rb"http://127\.0\.0\.1:(\d+)/v1")
OPTIONS: Final = (
    *("--prefill", str(NUM_PREFILL), "--decode", str(NUM_DECODE), "--gateways", str(NUM_GATEWAYS)),
    *("--routers", str(NUM_ROUTERS), "--router-policy", "cost", "--port", "0"),
    *("--kv-cache-memory", "16MiB", "--drain-timeout", "5"),
)
HELD: Final = ("active", "leased", "quarantined")  # pages that a cluster at rest has none of


class World:
    """pid: of `baton serve`."""

    def __init__(self, url: str, keys: Mapping[str, str], operator: Operator, pid: int) -> None:
        self.url = url
        self.keys = keys
        self._operator = operator
        self._pid = pid

    async def pids(self) -> dict[str, int]:
        """Name -> process id, of those that a router knows; Redis and `serve` are looked up here."""
        status = await self.status()
        found = {"serve": self._pid}
        if (redis := _find_redis(self._pid)) is not None:
            found["redis"] = redis
        if status is None:
            return found
        found |= {each.worker.name: each.worker.pid for each in status.workers}
        found |= {f"router-{n}": pid for n, pid in enumerate(sorted(each.pid for each in status.routers))}
        found |= {f"gateway-{n}": pid for n, pid in enumerate(sorted(each.pid for each in status.gateways))}
        return {name: pid for name, pid in found.items() if pid}

    async def status(self) -> Status | None:
        """None where no router answers."""
        try:
            return await self._operator.status()
        except (PeerGone, TimeoutError):
            return None

    async def is_whole_within(self, seconds: float) -> bool:
        """Whether every process is there again by then."""
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            status = await self.status()
            if status is not None and _num_processes(status) == NUM_PROCESSES:
                return True
            await asyncio.sleep(LOOK_S)
        return False

    async def pages_back_within(self, seconds: float) -> float | None:
        """How long until no worker holds a page for anybody; None: longer."""
        begin_s = time.perf_counter()
        while time.perf_counter() < begin_s + seconds:
            status = await self.status()
            if status is not None and _num_processes(status) == NUM_PROCESSES:
                pages = [each.load.pages for each in status.workers]
                if all(each and not any(each[state] for state in HELD) for each in pages):
                    return time.perf_counter() - begin_s
            await asyncio.sleep(LOOK_S)
        return None


def _num_processes(status: Status) -> int:
    return len(status.workers) + len(status.routers) + len(status.gateways)


@asynccontextmanager
async def open_world(folder: Path, runtime: str) -> AsyncIterator[World]:
    """WorkerLost when the cluster does not come up; its log is in the folder, and shown then."""
    keys = {tenant: secrets.token_hex(16) for tenant in TENANTS}
    tenants, log_path = folder / "tenants.yaml", folder / "serve.log"
    tenants.write_text(tenants_yaml(keys, {}))
    command = [sys.executable, "-m", "baton", "serve", MODEL, "--runtime", runtime, *OPTIONS]
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--tenants", str(tenants)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=environment_of_child(num_threads=1),
        )
    try:
        async with asyncio.timeout(START_S):
            port = await _port(process, log_path)
        record = find_record(port)
        async with connected(record.routers, record.keys) as operator:
            world = World(f"http://127.0.0.1:{port}", keys, operator, process.pid)
            if not await world.is_whole_within(START_S):
                raise WorkerLost("the cluster has not come together")
            yield world
    finally:
        await _stop(process)


async def _port(process: asyncio.subprocess.Process, log: Path) -> int:
    assert process.stdout is not None
    port = 0
    async for line in process.stdout:
        found = BANNER.search(line)
        port = int(found[1]) if found else port
        if line.startswith(b"curl"):
            return port
    raise WorkerLost(f"baton serve ended before it served: {log.read_text()[-2000:]}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()


def resident_mib(pid: int) -> float | None:
    """None: there is no such process any more."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    return None


def _find_redis(root: int) -> int | None:
    """The redis-server among the descendants of this process."""
    for pid in _descendants(root):
        with contextlib.suppress(OSError):
            program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
            if b"redis-server" in program or b"valkey-server" in program:
                return pid
    return None


def _descendants(root: int) -> Iterator[int]:
    pids = [root]
    while pids:
        for task in Path(f"/proc/{pids.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children = list(map(int, task.read_text().split()))
                yield from children
                pids += children


# The clients of bench/faults/soak.py: each asks again when it has its answer, and compares that with the
# right one.
#
# 1. A call streams with resumable events, asks for a whole answer, or hangs up in the middle, by chance.
# 2. A connection that breaks, or that nobody accepts, is a gateway's death: the stream is resumed with its
#    last event's id, anything else is asked again, at whatever gateway the port leads to.
# 3. A refusal is asked again after the time that it names. A call ends `answered`, `cancelled`, `wrong` or
# `lost`: an error within a stream, another status, or no end within MAX_CALL_S.

VOCAB_SIZE: Final = 1024
NUM_QUESTIONS: Final = 60
NUM_DOCUMENTS: Final = 6
DOCUMENT_TOKENS: Final = 240
REFUSALS: Final = (429, 503)
MAX_TOKENS: Final = (4, 24, 96, 200)
STREAM_SHARE, CANCEL_SHARE = 0.65, 0.15  # of calls that stream; of those, hang up
CANCEL_S: Final = (0.02, 2.0)
MAX_CALL_S: Final = 150.0
RETRY_S: Final = 0.5
MAX_RETRY_S: Final = 10.0  # a longer Retry-After is not waited for


class Question(NamedTuple):
    body: dict[str, Any]  # of a completion, but for how the answer comes
    golden: list[int]


class Lost(Exception):
    """A call that has no proper end."""


@dataclass
class Heard:
    """One stream, over all its connections."""

    token_ids: list[int] = field(default_factory=list)
    moments_s: list[float] = field(default_factory=list)  # when its events with tokens came
    last_id: str = ""
    finish_reason: str = ""
    is_done: bool = False


def make_questions(seed: int) -> list[Question]:
    """Questions about documents: greedy and seeded by turns, each answered once by one engine."""
    rng = random.Random(f"{seed} questions")
    documents = [_tokens(rng, DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS)]
    questions = []
    with LLM(MODEL, cache={"kv_cache_memory_bytes": 64 << 20}) as llm:
        for number in range(NUM_QUESTIONS):
            prompt = documents[number % NUM_DOCUMENTS][: rng.choice((0, 120, 240))] + _tokens(rng, 20)
            max_tokens, temperature = rng.choice(MAX_TOKENS), float(number % 2)
            sampling = SamplingParams(
                max_tokens=max_tokens, temperature=temperature, seed=number, ignore_eos=True
            )
            golden = list(llm.generate([prompt], sampling)[0].outputs[0].token_ids)
            body = {
                "model": MODEL,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": temperature,
                "seed": number,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            questions.append(Question(body, golden))
    return questions


class Clients:
    def __init__(
        self, url: str, keys: Mapping[str, str], questions: Sequence[Question], seed: int, num_clients: int
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.complaints: list[str] = []
        self.gaps_s: list[float] = []  # the longest of each stream, after its first token
        self.waits_s: list[float] = []  # for the first token of each stream
        self._addresses = [Address(url, key) for key in keys.values()]
        self._questions = questions
        self._rngs = [random.Random(f"{seed} client {number}") for number in range(num_clients)]
        self._begin_s = time.perf_counter()

    async def run(self, end_s: float) -> None:
        """Ask until then, and hear every answer to its end."""
        async with asyncio.TaskGroup() as group:
            for rng in self._rngs:
                group.create_task(self._ask_on(rng, end_s))

    async def _ask_on(self, rng: random.Random, end_s: float) -> None:
        while time.perf_counter() < end_s:
            address, question = rng.choice(self._addresses), rng.choice(self._questions)
            streams, hangs_up = rng.random() < STREAM_SHARE, rng.random() < CANCEL_SHARE
            cancel_s = rng.uniform(*CANCEL_S)
            try:
                async with asyncio.timeout(MAX_CALL_S):
                    if streams and hangs_up:
                        await self._hang_up(address, question, cancel_s)
                    elif streams:
                        await self._stream(address, question)
                    else:
                        await self._whole(address, question)
            except Lost as error:
                self._complain("lost", str(error))
            except TimeoutError:
                self._complain("lost", f"no end within {MAX_CALL_S:g} s")

    def _complain(self, outcome: str, text: str) -> None:
        self.outcomes[outcome] += 1
        self.complaints.append(f"{time.perf_counter() - self._begin_s:.0f} s: {outcome}: {text}")

    def _judge(self, question: Question, token_ids: list[int]) -> None:
        if token_ids == question.golden:
            self.outcomes["answered"] += 1
        else:
            same = sum(1 for _ in _common(token_ids, question.golden))
            self._complain(
                "wrong", f"{same} tokens agree of {len(token_ids)}, expected {len(question.golden)}"
            )

    # Three kinds of calls.

    async def _whole(self, address: Address, question: Question) -> None:
        while True:
            answer, is_broken = await self._post(address, _body(question, streams=False))
            if is_broken:
                self.outcomes["asked again"] += 1
            elif answer.status == 200:
                break
            else:
                await self._wait_to_retry(answer)
        content = json.loads(answer.body)
        self._judge(question, content["choices"][0]["token_ids"])

    async def _stream(self, address: Address, question: Question) -> None:
        heard, begin_s = Heard(), time.perf_counter()
        while not heard.is_done:
            header = f"last-event-id: {heard.last_id}\r\n" if heard.last_id else ""
            answer, is_broken = await self._post(address, _body(question, streams=True), header)
            if answer.status == 200:
                _hear(heard, answer)
            if is_broken:
                self.outcomes["resumed" if heard.last_id else "asked again"] += 1
            elif answer.status != 200:
                await self._wait_to_retry(answer)
            elif not heard.is_done:
                raise Lost("a stream ended without [DONE]")
        self.waits_s.append(heard.moments_s[0] - begin_s if heard.moments_s else 0.0)
        self.gaps_s.append(max((after - before for before, after in pairwise(heard.moments_s)), default=0.0))
        self._judge(question, heard.token_ids)

    async def _hang_up(self, address: Address, question: Question, after_s: float) -> None:
        try:
            async with asyncio.timeout(after_s):
                await self._post(address, _body(question, streams=True))
        except TimeoutError:
            pass
        self.outcomes["cancelled"] += 1

    async def _post(self, address: Address, body: bytes, header: str = "") -> tuple[Answer, bool]:
        """The answer, as far as it came, and whether its connection broke before its end."""
        try:
            connection = await Connection.open(address)
        except OSError:
            await asyncio.sleep(RETRY_S)
            return Answer(time.perf_counter()), True
        future: asyncio.Future[Answer | PeerGone] = asyncio.get_running_loop().create_future()
        request = address.post("/v1/completions", body, header)
        answer = connection.send(request, lambda end: None if future.done() else future.set_result(end))
        try:
            return answer, isinstance(await future, PeerGone)
        finally:
            connection.close()

    async def _wait_to_retry(self, answer: Answer) -> None:
        if answer.status not in REFUSALS:
            raise Lost(f"status {answer.status}: {answer.body[:200].decode(errors='replace')}")
        self.outcomes["refused"] += 1
        told_s = float(answer.retry_after) if answer.retry_after.isdecimal() else 0.0
        await asyncio.sleep(min(MAX_RETRY_S, max(RETRY_S, told_s)))


def _body(question: Question, *, streams: bool) -> bytes:
    how = {"stream": True, "stream_options": {"resumable": True}} if streams else {}
    return json.dumps({**question.body, **how}).encode()


def _hear(heard: Heard, answer: Answer) -> None:
    """Take the whole events of a connection. Lost: an error is among them."""
    for moment_s, id_, data in _events(answer):
        heard.last_id = id_ or heard.last_id
        if data == b"[DONE]":
            heard.is_done = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise Lost(f"an error in a stream after {len(heard.token_ids)} tokens: {event['error']}")
        for choice in event.get("choices") or ():
            token_ids = choice.get("token_ids") or []
            heard.token_ids += token_ids
            if token_ids:
                heard.moments_s.append(moment_s)


def _events(answer: Answer) -> Iterator[tuple[float, str, bytes]]:
    """Moment, id and data of each event that came whole; comments are skipped."""
    unread = b""
    for moment_s, piece in answer.pieces:
        *events, unread = (unread + piece).split(b"\n\n")
        for event in events:
            id_, data = "", b""
            for line in event.split(b"\n"):
                if line.startswith(b"id:"):
                    id_ = line[3:].strip().decode()
                elif line.startswith(b"data:"):
                    data += line[5:].strip()
            if data:
                yield moment_s, id_, data


def _common(one: Sequence[int], other: Sequence[int]) -> Iterator[int]:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a


def _tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(number)]
