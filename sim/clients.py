"""The clients of a simulation: their requests, their arrival times, and the answers that they get."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

import msgspec

from baton.errors import BatonError
from baton.request import FinishReason, Request, SamplingParams, TokenEvent, TokenIds
from baton.sim.deployment import MAX_MODEL_LEN, START_S, SimGateway
from baton.sim.engine import NUM_WORDS, POISON, UNSAMPLEABLE, golden
from baton.sim.process import Events

LOADS_S: Final = (0.5, 1.5, 4.0)  # all requests come within one of these times
MAX_CHOICES: Final = 3
BAD_REQUEST_CHANCE: Final = 0.006
CANCEL_CHANCES: Final = (0.05, 0.05, 0.5)
ARRIVALS_PER_S: Final = 2.0  # of a load that lasts
MOST_ARRIVALS: Final = (4, 16, 16, 40)


class SimClient:
    """One choice of one request. Violations are collected in `complaints`, not raised."""

    def __init__(self, request: Request, events: Events) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.error: BatonError | None = None
        self.has_cancelled = False
        self.opened_s = self.ended_s = 0.0
        self.gateway: SimGateway | None = None
        self.following: list[SimClient] = []  # further choices, submitted at this one's first token
        self.cancel_after_tokens: int | None = None
        self.complaints: list[str] = []
        self._events = events

    @property
    def name(self) -> str:
        """The name in complaints."""
        return self.request.request_id[:8]

    @property
    def is_over(self) -> bool:
        """The client gets no more events; the death of its gateway ends its connection."""
        has_ended = self.finish_reason is not None or self.error is not None or self.has_cancelled
        return has_ended or (self.gateway is not None and self.gateway.process.is_dead)

    @property
    def is_settled(self) -> bool:
        """The request was submitted, and the client gets no more events."""
        return self.gateway is not None and self.is_over

    @property
    def fate(self) -> str:
        """The way in which the request ended."""
        if self.error is not None:
            return type(self.error).__name__
        if self.finish_reason is not None:
            return str(self.finish_reason)
        if self.has_cancelled:
            return "cancelled"
        return "gone with its gateway" if self.gateway is not None else "never asked for"

    @property
    def is_unanswerable(self) -> bool:
        """No worker can answer the request."""
        token_ids = self.request.token_ids
        return bool({POISON, UNSAMPLEABLE} & set(token_ids)) or len(token_ids) >= MAX_MODEL_LEN

    def golden(self) -> tuple[list[int], FinishReason]:
        """Return the answer of an undisturbed run."""
        return golden(self.request, self.request.sampling.seed, MAX_MODEL_LEN)

    def open(self, gateway: SimGateway, sticky_worker: str = "") -> None:
        """Submit the request."""
        self.gateway = gateway
        self.opened_s = self._events.now_s
        gateway.process.post(lambda: self._open(gateway, sticky_worker))

    def cancel(self) -> None:
        """Cancel the request, unless the stream is over."""
        if self.gateway is not None and not self.is_over:
            self.gateway.process.post(self._cancel)

    def tokens(self, events: Sequence[TokenEvent]) -> None:
        """Take tokens from the gateway."""
        is_first = not self.token_ids
        for event in events:
            self._take(event)
        self.ended_s = self._events.now_s
        if is_first and self.gateway is not None:
            sticky_worker = self.gateway.frontend.decode_worker(self.request.request_id)
            for client in self.following:
                client.open(self.gateway, sticky_worker)
        if self.cancel_after_tokens is not None and len(self.token_ids) >= self.cancel_after_tokens:
            self.cancel()

    def failed(self, error: BatonError) -> None:
        """Take an error from the gateway; the choices that were to follow are never submitted."""
        self._check_open()
        self.error = error
        for client in self.following:
            if client.gateway is None:
                client.error = error

    def _open(self, gateway: SimGateway, sticky_worker: str) -> None:
        try:
            gateway.frontend.open(self.request, self, sticky_worker=sticky_worker)
        except BatonError as error:
            self.failed(error)

    def _cancel(self) -> None:
        if not self.is_over and self.gateway is not None:
            self.has_cancelled = True
            self.gateway.frontend.cancel(self.request.request_id)

    def _take(self, event: TokenEvent) -> None:
        self._check_open()
        if event.index != len(self.token_ids):
            self.complaints.append(f"token {event.index} came after {len(self.token_ids)}")
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
        self.finish_reason = event.finish_reason

    def _check_open(self) -> None:
        if self.is_over:
            self.complaints.append("it gets an event after its end")
        self.ended_s = self._events.now_s


@dataclass
class Arrival:
    """One request, with a client for each choice."""

    at_s: float
    gateway: int  # index in the deployment
    clients: list[SimClient]
    cancel_s: float | None = None  # after the arrival

    @property
    def has_ended(self) -> bool:
        """Every submitted choice is settled."""
        first, *others = self.clients
        return first.is_settled and all(each.is_settled for each in others if each.gateway is not None)


class ClientLoad:
    """Draws the requests of a simulation."""

    def __init__(
        self,
        events: Events,
        random: Random,
        bad_request_chance: float,
        lasts_s: float = 0.0,
        draw_model: Callable[[], str] = str,
    ) -> None:
        """bad_request_chance: of each kind of request that no worker can answer. lasts_s: see World.

        draw_model: returns the model of the next request.
        """
        self._draw_model = draw_model
        self._lasts_s = lasts_s
        self._events = events
        self._bad_request_chance = bad_request_chance
        self._cancel_chance = random.choice(CANCEL_CHANCES)
        self._random = random
        self.ends_s = START_S + (lasts_s or random.choice(LOADS_S))
        self._documents = [[random.randrange(NUM_WORDS) for _ in range(48)] for _ in range(2)]

    def arrivals(self, num_gateways: int) -> list[Arrival]:
        """Draw all requests."""
        num_arrivals = self._random.randint(1, self._random.choice(MOST_ARRIVALS))
        if self._lasts_s:
            num_arrivals = round(self._lasts_s * ARRIVALS_PER_S)
        return [self._arrival(num_gateways) for _ in range(num_arrivals)]

    def _arrival(self, num_gateways: int) -> Arrival:
        random = self._random
        first = self._request()
        num_choices = random.choice((1, 1, 1, 1, MAX_CHOICES))
        requests = [
            msgspec.structs.replace(first, choice=choice, request_id=random.randbytes(16).hex())
            for choice in range(num_choices)
        ]
        clients = [SimClient(request, self._events) for request in requests]
        clients[0].following = clients[1:]
        for client in clients:
            if random.random() < self._cancel_chance:
                client.cancel_after_tokens = random.randint(1, 8)
        cancel_s = random.uniform(0.0, 1.0) if random.random() < self._cancel_chance else None
        at_s = random.uniform(random.choice((0.0, START_S, START_S)), self.ends_s)
        return Arrival(at_s, random.randrange(num_gateways), clients, cancel_s)

    def _request(self) -> Request:
        random = self._random
        is_greedy = random.random() < 0.3
        max_tokens = random.choice((1, 2, 5, 12, 24, 40, None))
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=random.randint(0, min(4, max_tokens or 4)),
            temperature=0.0 if is_greedy else 1.0,
            seed=None if is_greedy else random.getrandbits(62),
            stop_token_ids=tuple(random.sample(range(NUM_WORDS), random.choice((0, 0, 2)))),
        )
        return Request(
            request_id="0" * 32,
            token_ids=TokenIds.of(self._prompt()),
            sampling=sampling,
            cache_salt=random.choice((b"", b"tenant")),
            priority=random.choice((0, 0, 0, 1, -1)),
            model=self._draw_model(),
        )

    def _prompt(self) -> list[int]:
        random = self._random
        known = random.choice(self._documents)[: random.choice((0, 0, 16, 32, 48))]
        own = [random.randrange(NUM_WORDS) for _ in range(random.randint(1, 24))]
        prompt = known + own
        for token_id in (POISON, UNSAMPLEABLE):
            if random.random() < self._bad_request_chance:
                prompt[random.randrange(len(prompt))] = token_id
        if random.random() < self._bad_request_chance:
            prompt = (prompt * MAX_MODEL_LEN)[:MAX_MODEL_LEN]
        return prompt
