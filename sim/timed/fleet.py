"""The parts of a rehearsal: calls and their outcomes, workers, their pages and their measurements, and the
gateway as a peer.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from random import Random
from typing import Final

import msgspec

from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import Hello, Measured, Rejected
from baton.messages.workers import Address, PrefillTimes, StepTimes, Tier, Worker, WorkerRole
from baton.rpc.peer_clock import SAME_CLOCK, ClockOffset
from baton.rpc.worker_node import MEASURED_S
from baton.sim.timed.times import StepWork
from baton.tenants import SchedulingKey, Sla

BODY_S: Final = 5e-5  # a message on its way
MAX_HONOURED_S: Final = 120.0  # a longer retry-after is ignored: the client backs off by itself
BACK_OFF_S: Final = 0.5
MAX_BACK_OFF_S: Final = 8.0
GATEWAY: Final = f"{7:032x}"
PARTS: Final = ("queued", "prefill_queued", "prefill_computing", "transfer_exposed", "decode_computing")


class ClientCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a client makes."""

    at_s: float
    token_ids: Sequence[int]
    num_answered: int  # tokens of the answer
    max_tokens: int = 2**20  # all that the router knows of the answer
    tenant: str = ""
    sla: Sla = Sla()
    scheduling_key: SchedulingKey = SchedulingKey()
    # Short keys of the prompt's pages, for workers of one page size; None: those of its tokens.
    page_keys: bytes | None = None
    num_more_pages: int = 0  # pages of the prompt that no other prompt has; they have no keys

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)


class CallOutcome(msgspec.Struct, kw_only=True):
    """The course of one HTTP request. Moments are negative where there was none."""

    call: ClientCall
    asked_s: float
    retry: int = 0
    # Seconds beside the simulated course: the way to a worker and back, and what the first and the last token
    # wait for the gateway.
    way_s: float = 0.0
    first_wait_s: float = 0.0
    last_wait_s: float = 0.0
    num_held: int = 0  # tokens of the prompt that were not computed
    given_s: float = -1.0  # a worker has the prompt
    begun_s: float = -1.0  # the first step of the prompt
    joined_s: float = -1.0  # the sequence decodes
    first_token_s: float = -1.0
    ended_s: float = -1.0
    refusal: str = ""
    retry_after_s: float = -1.0

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.asked_s

    def parts(self) -> dict[str, float]:
        """Return the seconds of an answered request, by the names of timelines."""
        moments = self.asked_s, self.given_s, self.begun_s, self.first_token_s, self.joined_s, self.ended_s
        return {name: end - begin for name, (begin, end) in zip(PARTS, pairwise(moments), strict=True)}

    @property
    def is_good(self) -> bool:
        """True when the answer met all objectives."""
        if self.ended_s < 0:
            return False
        sla, num_later = self.call.sla, max(1, self.call.num_answered - 1)
        tpot_ms = 1e3 * (self.ended_s - self.first_token_s) / num_later
        is_slow = sla.tpot_ms is not None and tpot_ms > sla.tpot_ms
        return not is_slow and (sla.ttft_ms is None or 1e3 * self.ttft_s <= sla.ttft_ms)


class PageStore:
    """Keys of pages, the least recently used first; a page leaves before its parents."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # key -> 0, or the number of pages without keys
        self._num_used = 0
        self._ids = count()

    def num_held(self, keys: tuple[bytes, ...]) -> int:
        """Return how many leading pages are here."""
        for number, key in enumerate(keys):
            if key not in self._pages:
                return number
        return len(keys)

    def keep(self, keys: tuple[bytes, ...], num_more: int = 0) -> dict[Tier | None, list[bytes]]:
        """Keep these pages, and more that no prompt will ask for; the more are the first to leave.

        Returns the keys of the pages that left, and of those that came, as `PageChanges` has them.
        """
        keys, pages = keys[: self._num_pages], self._pages
        num_more = min(num_more, self._num_pages - len(keys))
        if num_more > 0:
            pages[next(self._ids).to_bytes(9, "big")] = num_more
        new = [key for key in reversed(keys) if key not in pages]
        for key in reversed(keys):
            if key in pages:
                pages.move_to_end(key)
        self._num_used += len(new) + max(0, num_more)
        left: list[bytes] = []
        while self._num_used > self._num_pages:
            key, num_without_keys = pages.popitem(last=False)
            self._num_used -= num_without_keys or 1
            if not num_without_keys:
                left.append(key)
        pages.update(dict.fromkeys(new, 0))
        return {None: left, Tier.DEVICE: new}


class Measurements:
    """The times that a worker measures, until it tells them to its router: see `WorkerReports`."""

    def __init__(self, sample_s: float) -> None:
        """sample_s: between two samples of steps."""
        self.prefills: list[PrefillTimes] = []
        self._steps: list[StepTimes] = []
        self._sample_s = sample_s
        self._next_sample_s = self._next_taken_s = 0.0

    def sample_step(self, work: StepWork, step_s: float, now_s: float) -> None:
        """Keep the time of a step, if a sample is due."""
        if now_s >= self._next_sample_s:
            self._next_sample_s = now_s + self._sample_s
            context = work.num_context + work.num_new
            self._steps.append(StepTimes(work.num_sequences, work.num_new, context, step_s))

    def take_due(self, now_s: float) -> Measured | None:
        """Return what was measured, once every MEASURED_S; None in between, or without a measurement."""
        if now_s < self._next_taken_s:
            return None
        self._next_taken_s = now_s + MEASURED_S
        if not (self.prefills or self._steps):
            return None
        measured = Measured(prefills=tuple(self.prefills), steps=tuple(self._steps))
        self.prefills, self._steps = [], []
        return measured


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The number of workers, and their room."""

    num_prefill: int = 8
    num_decode: int = 1
    num_prefill_pages: int = 8000
    num_decode_pages: int = 1_000_000
    num_decode_seqs: int = 100_000
    prefill_keeps: bool = True  # whether prefill workers keep pages for later prompts
    decode_keeps: bool = False
    prefill_budget: float = math.inf  # tokens of a prefill worker's step; inf: one whole prompt a step
    decode_budget: float = 2048
    max_model_len: int = 2**20

    def workers(self, page_size: int, scale: float) -> Iterator[Worker]:
        """Yield every worker as it introduces itself."""
        roles = [WorkerRole.PREFILL] * self.num_prefill + [WorkerRole.DECODE] * self.num_decode
        for number, role in enumerate(roles):
            is_prefill = role is WorkerRole.PREFILL
            yield Worker(
                id=f"{number + 16:032x}",
                name=f"{role}-{number}",
                role=role,
                model="m",
                fingerprint="f",
                address=Address("127.0.0.1", 1000 + number),
                kv_address=Address("127.0.0.1", 3000 + number),
                page_size=page_size,
                num_pages=self.num_prefill_pages if is_prefill else self.num_decode_pages,
                max_num_seqs=self.num_decode_seqs,
                max_num_batched_tokens=round(self.decode_budget / scale),
                max_model_len=self.max_model_len,
            )


def retry_s(rejected: Rejected, retry: int, random: Random) -> float:
    """Return the seconds until a client asks again, as openai-python does. retry: how often it has before."""
    if rejected.retry_after_s <= MAX_HONOURED_S:
        return rejected.retry_after_s
    back_off_s = min(BACK_OFF_S * 2.0**retry, MAX_BACK_OFF_S)
    return back_off_s * (1 - 0.25 * random.random())


class FastGateway:
    """The router's peer that submits requests."""

    silence_s = quiet_s = 0.0
    clock_offset: ClockOffset | None = SAME_CLOCK

    def __init__(self, rejected: Callable[[Rejected], None]) -> None:
        self.hello = Hello(process=Kind.GATEWAY, id=GATEWAY)
        self._rejected = rejected

    def send(self, message: AnyMessage) -> None:
        """Take a message of the router."""
        if isinstance(message, Rejected):
            self._rejected(message)

    def close(self) -> None:
        raise AssertionError("the router gave up its gateway")
