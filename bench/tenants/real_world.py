"""`baton serve` with tenants, as a user starts it, and what they ask of it over HTTP.

Clients behave as openai-python does: what is refused comes again, after the time that it was told, or half a
second and then one, twice at most; and not if it is told not to. Times of a call are from when it was due:
one that a full server keeps from being asked is late all the same.
"""

import asyncio
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

import yaml

from baton.bench.serve.client import Address, Client, sleep_until
from baton.bench.serve.figures import Bad, Sample, Slo, streamed
from baton.bench.serve.load import Job
from baton.bench.tenants.idle_load import CoreTimes, core_times
from baton.config.environment import environment_of_child
from baton.errors import PeerGone, WorkerLost

START_S: Final = 120.0
STOP_S: Final = 30.0
MODEL: Final = "tiny"
STEP_TOKENS: Final = 256  # between two steps a worker looks whose turn it is
OPTIONS: Final = (
    *("--runtime", "local", "--prefill", "1", "--decode", "1", "--kv-cache-memory", "256MiB"),
    *("--max-num-batched-tokens", str(STEP_TOKENS), "--drain-timeout", "1", "--port", "0"),
)
BANNER: Final = re.compile(rb"http://127\.0\.0\.1:(\d+)/v1")
REFUSALS: Final = (429, 503)
MAX_RETRIES: Final = 2  # openai-python's
MAX_HONOURED_S: Final = 60.0  # a longer retry-after is not believed
BACK_OFF_S: Final = 0.5
MAX_TOLD_S: Final = 600
IDLE_S: Final = 0.3


class Call(NamedTuple):
    tenant: str
    job: Job


class Outcome(NamedTuple):
    """Of one HTTP request."""

    call: Call
    asked_s: float  # after the load began; when it was due
    retry: int
    status: int = 0  # 0: it had no whole answer when the load was over
    retry_after: str = ""  # the header
    may_return: bool = True
    sample: Sample | None = None  # None: it has no answer that counts

    @property
    def is_refused(self) -> bool:
        return self.status in REFUSALS

    @property
    def is_told(self) -> bool:
        """Whether it says, in whole seconds, when to come again."""
        return self.retry_after.isdecimal() and 0 < int(self.retry_after) <= MAX_TOLD_S

    def is_good(self, slo: Slo) -> bool:
        return self.sample is not None and slo.is_met(self.sample)


class Server:
    """What runs, and who may ask it."""

    def __init__(self, url: str, keys: Mapping[str, str], pid: int = 0) -> None:
        """pid: of what was started; 0: of nothing."""
        self._pid = pid
        self._clients = {tenant: Client(Address(url, key)) for tenant, key in keys.items()}

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    async def load(self, calls: Sequence[Call], until_s: float) -> list[Outcome]:
        """Every call when it is due; what has not ended `until_s` after the begin is given up then."""
        found: list[Outcome] = []
        begin_s = time.perf_counter()
        bodies = [call.job.body(MODEL, stream=True) for call in calls]
        asking = [
            asyncio.create_task(self._call(call, body, begin_s, found))
            for call, body in zip(calls, bodies, strict=True)
        ]
        _, late = await asyncio.wait(asking, timeout=until_s - (time.perf_counter() - begin_s))
        for task in late:
            task.cancel()
        for ended in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        return found

    def core_times(self) -> CoreTimes:
        return core_times(self._pid)

    async def most(self, calls: Sequence[Call], num_at_once: int) -> float:
        """How many prompt tokens a second there can be: of these calls, so many at once."""
        left, found = iter(calls), list[Outcome]()
        begin_s = time.perf_counter()

        async def work() -> None:
            for call in left:
                await self._ask(call, call.job.body(MODEL, stream=True), time.perf_counter(), 0, found)

        await asyncio.gather(*(work() for _ in range(num_at_once)))
        num_tokens = sum(len(each.call.job.prompt) for each in found if each.sample is not None)
        return num_tokens / (time.perf_counter() - begin_s)

    async def settle(self, call: Call) -> None:
        """Return when what was given up is out of the way: this call is answered as an idle server does."""
        while True:
            begin_s = time.perf_counter()
            outcome = await self._ask(call, call.job.body(MODEL, stream=True), begin_s, 0, [])
            if outcome.sample is not None and outcome.sample.ttft_s < IDLE_S:
                return
            await asyncio.sleep(IDLE_S)

    async def _call(self, call: Call, body: bytes, begin_s: float, found: list[Outcome]) -> None:
        due_s = begin_s + call.job.arrival_s
        for retry in range(MAX_RETRIES + 1):
            await sleep_until(due_s)
            outcome = await self._ask(call, body, due_s, retry, found, begin_s)
            if not (outcome.is_refused and outcome.may_return):
                return
            told_s = int(outcome.retry_after) if outcome.is_told else 0
            is_believed = 0 < told_s <= MAX_HONOURED_S
            due_s = time.perf_counter() + (told_s if is_believed else BACK_OFF_S * 2**retry)

    async def _ask(
        self, call: Call, body: bytes, due_s: float, retry: int, found: list[Outcome], begin_s: float = 0.0
    ) -> Outcome:
        """Its outcome is in `found` too, even where the load is over before."""
        outcome = Outcome(call, due_s - begin_s, retry)
        try:
            answer = await self._clients[call.tenant].post("/v1/completions", body)
            may_return = answer.should_retry != "false"
            outcome = outcome._replace(
                status=answer.status, retry_after=answer.retry_after, may_return=may_return
            )
            outcome = outcome._replace(sample=streamed(answer, due_s, call.job.num_tokens))
        except (Bad, PeerGone):
            pass
        finally:
            found.append(outcome)
        return outcome


def tenants_yaml(keys: Mapping[str, str], slos: Mapping[str, Slo], stopped: Collection[str] = ()) -> str:
    """All of one weight. No quotas, but that of the stopped: a token a second."""
    tenants: dict[str, object] = {}
    for name, key in keys.items():
        slo = slos.get(name, Slo())
        limits = {"ttft_ms": slo.ttft_s, "tpot_ms": slo.tpot_s}
        sla = {limit: 1e3 * limit_s for limit, limit_s in limits.items() if limit_s is not None}
        digest = sha256(key.encode()).hexdigest()
        quotas = {"tokens_per_s": 1, "burst_tokens": 1} if name in stopped else {}
        tenants[name] = {"keys": [f"sha256:{digest}"], "sla": sla, "quotas": quotas}
    return yaml.safe_dump({"tenants": tenants}, sort_keys=False)


@asynccontextmanager
async def serving(
    slos: Mapping[str, Slo], folder: Path, stopped: Collection[str] = ()
) -> AsyncIterator[Server]:
    """A cluster for these tenants, with what the file promises each. WorkerLost when it does not come up."""
    keys = {tenant: secrets.token_hex(16) for tenant in slos}
    file = folder / "tenants.yaml"
    file.write_text(tenants_yaml(keys, slos, stopped))
    # A thread each: on few cores more would measure how workers get in each other's way, and not the tenants.
    environment = environment_of_child(num_threads=1)
    command = [
        sys.executable,
        "-m",
        "baton",
        "serve",
        MODEL,
        *OPTIONS,
        "--tenants",
        str(file),
    ]
    with (folder / "serve.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=environment,
        )
    try:
        async with asyncio.timeout(START_S):
            url = await _url(process)
        server = Server(url, keys, process.pid)
        try:
            yield server
        finally:
            server.close()
    finally:
        await _stop(process)


async def _url(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    url = ""
    async for line in process.stdout:
        found = BANNER.search(line)
        url = f"http://127.0.0.1:{int(found[1])}" if found else url
        if line.startswith(b"curl"):
            return url
    raise WorkerLost("baton serve ended before it served; serve.log says why")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
