"""The policy that knows costs: which pair of workers is cheapest for a prompt, in seconds (see costs.py).

Each worker is asked what the prompt would cost there: all of them, or, where there are very many, those that
hold most of it and some others by chance. Then the best of either role are combined.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from random import Random
from typing import Final, NamedTuple, TypeAlias

from baton.clock import Clock
from baton.decision import PullSource
from baton.request import Request
from baton.router.books import num_kv_tokens
from baton.router.costs import (
    Candidate,
    Computer,
    Decoder,
    Filled,
    Load,
    Select,
    cheapest,
    fill,
    local,
    longest,
    remote,
)
from baton.router.fading import Fading
from baton.router.look import MAX_SOURCES, Known, Look
from baton.router.prompts_ahead import LeadOf
from baton.router.sides import Side, Station
from baton.router.spread import Spread

MAX_COMPARED: Final = 16  # of a role; where there are more:
MAX_HOLDERS: Final = 3  # those of each way to name pages that hold most
NUM_DRAWN: Final = 4  # and of some by chance
NUM_KEPT: Final = 2  # those with the least to do, and more where fewer hold any; see decision 11
MAX_DRAWS: Final = 32  # for these, where some workers are left out
MAX_COMBINED: Final = 3  # of a role
MEMORY_S: Final = 30.0  # of how busy the cluster has been
BALANCE_S: Final = 300.0  # over which workers that cost the same are to be given the same
MOST_BUSY: Final = 0.9
EXPECTED_FOR_S: Final = 2.0  # after the prompt should be there


Worth: TypeAlias = float | tuple[float, float]  # of one kind where they are compared
ArePair: TypeAlias = Callable[[str, str], bool]  # ids of a decode and a prefill worker
HasPlace: TypeAlias = Callable[[str], bool]  # id of a worker


class Choice(NamedTuple):
    """`candidates` are all that were weighed."""

    candidate: Candidate
    candidates: Sequence[Candidate]
    source: PullSource | None
    keys: Mapping[str, bytes]  # of the prompt's pages, by each worker that will have them
    is_blind: bool  # what the worker that computes the prompt holds is unknown
    is_owed: bool  # its tenant has had less than others


class Field(NamedTuple):
    """Who could serve an attempt: at least one decode worker, and those that could fill its pages."""

    decoders: Side
    fillers: Side
    are_pair: ArePair
    left_out: Collection[str] = ()  # decode workers that may not take it; never all
    avoided: Collection[str] = ()  # workers that are not to fill its pages

    def station(self, worker_id: str) -> Station:
        """Of one that was compared."""
        return self.decoders.by_id.get(worker_id) or self.fillers.by_id[worker_id]


class Turn(NamedTuple):
    """What a request's tenant is due."""

    lead: float | None = None  # see prompts_ahead.py
    lead_of: LeadOf | None = None  # the same
    has_place: HasPlace | None = None  # to compute it at once; a decode worker without one computes no prompt
    needs_place: bool = False  # at a prefill worker too: it waits where that is best and has none
    wanted: Collection[str] = ()  # workers where others wait for a place, before it: it has none there

    def has_place_at(self, worker_id: str) -> bool:
        return worker_id not in self.wanted and (self.has_place is None or self.has_place(worker_id))

    @property
    def is_owed(self) -> bool:
        """Its tenant has had less than others."""
        return self.lead is not None and self.lead < 0


NO_TURN: Final = Turn()
_TOTAL_S: Final = attrgetter("total_s")


class Chooser:
    def __init__(self, clock: Clock, known: Known, random: Random, *, only_prefix: bool = False) -> None:
        """only_prefix: wherever most of the prompt is held, whatever the cost."""
        self._clock = clock
        self._known = known
        self._random = random
        self._only_prefix = only_prefix
        self.select: Select = longest if only_prefix else cheapest
        self._worth: Callable[[Filled], Worth] = _most_held if only_prefix else _TOTAL_S
        now_s = clock.now_s()
        self._crowd = _Crowd(now_s)
        self._owed_crowd = _Crowd(now_s)  # of tenants that were owed work: those alone wait behind each other
        self._tokens: dict[str, Fading] = {}  # by worker

    def choose(self, request: Request, field: Field, turn: Turn = NO_TURN) -> Choice:
        """It is no more than an answer until `expect` says that it is followed."""
        now_s = self._clock.now_s()
        look = Look(self._known, request, self._load(request, turn, now_s), now_s)
        decoders = self._compared(look, field.decoders, field.left_out)
        fillers = self._compared(look, field.fillers, field.avoided)
        decoding, filling = look.decoders(decoders), look.computers(fillers)
        random, source = self._random.getrandbits(32), None
        for _ in range(MAX_SOURCES + 1):
            candidates = self._candidates(look, decoding, filling, field.are_pair)
            candidates = self._placed(candidates, turn)
            chosen = self.select(candidates, random, lambda worker_id: self._given(worker_id).at(now_s))
            source = look.locate(field.station(chosen.source)) if chosen.source else None
            if not chosen.source or (source and source.num_tokens >= chosen.num_held_tokens):
                break  # else it is only expected to hold so much: look knows that now
        keys = {each: look.keys(field.station(each)) for each in (chosen.prefill, chosen.decode) if each}
        is_known = self._known.index.is_known(chosen.computer)
        return Choice(chosen, candidates, source, keys, not is_known, turn.is_owed)

    def expect(self, choice: Choice, num_tokens: int) -> None:
        """A prompt of so many tokens was sent there: its siblings find its pages, and what is there already
        stays young.
        """
        chosen, now_s = choice.candidate, self._clock.now_s()
        self._crowd.add(chosen.computer, chosen.filled.compute_s, now_s)
        if choice.is_owed:
            self._owed_crowd.add(chosen.computer, chosen.filled.compute_s, now_s)
        self._given(chosen.computer).add(num_tokens, now_s)
        ttl_s = chosen.terms.ttft_s + EXPECTED_FOR_S
        for worker_id, keys in choice.keys.items():
            self._known.index.expect(worker_id, keys, ttl_s)

    def forget(self, worker_id: str) -> None:
        """It is gone."""
        self._tokens.pop(worker_id, None)
        for crowd in (self._crowd, self._owed_crowd):
            crowd.forget(worker_id, self._clock.now_s())

    def _given(self, worker_id: str) -> Fading:
        if worker_id not in self._tokens:
            self._tokens[worker_id] = Fading(BALANCE_S, self._clock.now_s())
        return self._tokens[worker_id]

    def _load(self, request: Request, turn: Turn, now_s: float) -> Load:
        crowd = self._owed_crowd if turn.is_owed else self._crowd
        num_tokens = request.num_tokens
        num_output_tokens = num_kv_tokens(request) - num_tokens
        return Load(num_tokens, num_output_tokens, crowd.rate(now_s), turn.lead, turn.lead_of)

    def _compared(self, look: Look, side: Side, left_out: Collection[str]) -> list[Station]:
        """In an order that begins with another one each time: what comes first wins where all is alike."""
        stations, random = side.stations(self._known.index), self._random.random
        num = len(stations)
        if num <= MAX_COMPARED:
            first = int(random() * num)
            return _without(left_out, [*stations[first:], *stations[:first]])
        found = look.holders(side, MAX_HOLDERS + len(left_out), stations[int(random() * num)])
        drawn = [stations[int(random() * num)] for _ in range(MAX_DRAWS if left_out else NUM_DRAWN)]
        if left_out:
            found, drawn = _without(left_out, found), _without(left_out, drawn)[:NUM_DRAWN]
        drawn.sort(key=self._work)
        found = found[:MAX_HOLDERS]
        found += drawn[: MAX_HOLDERS + NUM_KEPT - len(found)]
        found = found or _without(left_out, stations)[:MAX_COMPARED]
        return list({station.id: station for station in found}.values())

    def _work(self, station: Station) -> tuple[float, int]:
        account = self._known.books.account(station.id)
        return account.work_s, account.num_attempts

    def _candidates(
        self, look: Look, decoders: Sequence[Decoder], computers: Sequence[Computer], are_pair: ArePair
    ) -> list[Candidate]:
        load, handoff_s_of = look.load, self._known.model.handoff_s
        there = [decoder.computer for decoder in decoders]
        sources = [] if self._only_prefix else look.sources([*there, *computers])
        by_itself = map(local, fill(there, load, sources), decoders)
        candidates = sorted(by_itself, key=_TOTAL_S)[:MAX_COMBINED]
        best = sorted(fill(computers, load, sources), key=self._worth)[:MAX_COMBINED]
        for decoder in sorted(decoders, key=_TOTAL_S)[:MAX_COMBINED]:
            computer = decoder.computer
            decode, num_moved = computer.worker, max(0, load.num_tokens - computer.num_held_tokens)
            for each in best:
                prefill = each.computer.worker
                if are_pair(decode, prefill):
                    candidates.append(remote(each, decoder, handoff_s_of(prefill, decode, num_moved)))
        return candidates

    def _placed(self, candidates: list[Candidate], turn: Turn) -> list[Candidate]:
        """Without those that a decode worker has no place for and would compute itself, and without workers
        that others wait for, if any are left.

        Another rule of choice goes by nothing else.
        """
        if turn.has_place is None or self.select is not cheapest:
            return candidates
        wanted, has_place_at = turn.wanted, turn.has_place_at
        placed = [each for each in candidates if each.prefill or has_place_at(each.decode)]
        return [each for each in placed if each.computer not in wanted] or placed or candidates


class _Crowd:
    """Prompts that were given out lately."""

    def __init__(self, now_s: float) -> None:
        self._num = Spread(MEMORY_S, now_s)
        self._work_s = Spread(MEMORY_S, now_s)

    def add(self, worker_id: str, compute_s: float, now_s: float) -> None:
        self._num.add(worker_id, 1.0, now_s)
        self._work_s.add(worker_id, compute_s, now_s)

    def forget(self, worker_id: str, now_s: float) -> None:
        self._num.forget(worker_id, now_s)
        self._work_s.forget(worker_id, now_s)

    def rate(self, now_s: float) -> float:
        """How many a second come to a worker, and more where these hold up others in turn."""
        busy = min(MOST_BUSY, self._work_s.mean(now_s) / MEMORY_S)
        return self._num.mean(now_s) / MEMORY_S / (1 - busy)


def _without(left_out: Collection[str], stations: Sequence[Station]) -> list[Station]:
    return [each for each in stations if each.id not in left_out] if left_out else list(stations)


def _most_held(filled: Filled) -> tuple[float, float]:
    return -filled.num_held_tokens, filled.total_s
