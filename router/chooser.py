"""The policy that knows costs: which pair of workers is cheapest for a prompt, in seconds (see costs.py).

Each worker is asked what the prompt would cost there: all of them, or, where there are very many, those that
hold most of it and some others by chance. Then the best of either role are combined.
"""

from collections.abc import Callable, Sequence
from math import exp
from random import Random
from typing import Final, NamedTuple

from baton.clock import Clock
from baton.decision import PullSource
from baton.request import Request
from baton.router.books import num_kv_tokens
from baton.router.costs import Candidate, Filled, Load, cheapest, decode_terms, fill, local, longest, remote
from baton.router.look import Known, Look
from baton.router.membership import Member

MAX_COMPARED: Final = 16  # of a role
MAX_HOLDERS: Final = 6  # of these, where there are more
MAX_COMBINED: Final = 4  # of a role
MEMORY_S: Final = 30.0  # of how busy the cluster has been
MOST_BUSY: Final = 0.9
EXPECTED_FOR_S: Final = 2.0  # after the prompt should be there


class Choice(NamedTuple):
    """`candidates` are all that were weighed."""

    candidate: Candidate
    candidates: Sequence[Candidate]
    source: PullSource | None
    is_blind: bool  # what the worker that computes the prompt holds is unknown


class Field(NamedTuple):
    """Who could serve an attempt: at least one decode worker, and those that could fill its pages."""

    decoders: Sequence[Member]
    fillers: Sequence[Member]
    are_pair: Callable[[str, str], bool]  # ids of a decode and a prefill worker


class Chooser:
    def __init__(self, clock: Clock, known: Known, random: Random, *, only_prefix: bool = False) -> None:
        """only_prefix: wherever most of the prompt is held, whatever the cost."""
        self._clock = clock
        self._known = known
        self._random = random
        self._only_prefix = only_prefix
        self._given_s = 0.0  # computing that was given out, fading
        self._num_given = 0.0  # prompts, fading
        self._faded_s = clock.now_s()

    def choose(self, request: Request, field: Field) -> Choice:
        """And expect the prompt's pages where it will be, so that its siblings find them at once."""
        look = Look(self._known, request, self._load(request, field), self._clock.now_s())
        field = field._replace(
            decoders=self._compared(look, field.decoders), fillers=self._compared(look, field.fillers)
        )
        members = {member.id: member for member in (*field.decoders, *field.fillers)}
        candidates = self._candidates(look, field)
        select = longest if self._only_prefix else cheapest
        chosen = select(candidates, self._random.getrandbits(32))
        source = look.locate(members[chosen.source]) if chosen.source else None
        self._given_s += chosen.terms.compute_s
        self._num_given += 1
        for worker_id in filter(None, (chosen.prefill, chosen.decode)):
            keys = look.keys(members[worker_id])
            self._known.index.expect(worker_id, keys, chosen.terms.ttft_s + EXPECTED_FOR_S)
        is_known = self._known.index.is_known(chosen.prefill or chosen.decode)
        return Choice(chosen, candidates, source, not is_known)

    def _load(self, request: Request, field: Field) -> Load:
        self._fade()
        num_computers = len(field.fillers) or len(field.decoders)
        busy = min(MOST_BUSY, self._given_s / MEMORY_S / num_computers)
        rate = self._num_given / MEMORY_S / num_computers
        num_tokens = request.num_tokens
        return Load(num_tokens, num_kv_tokens(request) - num_tokens, rate / (1 - busy))

    def _fade(self) -> None:
        now_s = self._clock.now_s()
        faded = exp((self._faded_s - now_s) / MEMORY_S)
        self._given_s *= faded
        self._num_given *= faded
        self._faded_s = now_s

    def _compared(self, look: Look, members: Sequence[Member]) -> Sequence[Member]:
        if len(members) <= MAX_COMPARED:
            return members
        holders = sorted(members, key=look.num_held_tokens, reverse=True)[:MAX_HOLDERS]
        others = self._random.sample(members, MAX_COMPARED - MAX_HOLDERS)
        return list({member.id: member for member in (*holders, *others)}.values())

    def _candidates(self, look: Look, field: Field) -> list[Candidate]:
        load = look.load
        sources = [] if self._only_prefix else look.sources((*field.decoders, *field.fillers))
        decoders = [look.decoder(member) for member in field.decoders]
        candidates = [local(decoder, load, sources) for decoder in decoders]
        candidates = sorted(candidates, key=_total_s)[:MAX_COMBINED]
        filled = [fill(look.computer(member), load, sources) for member in field.fillers]
        filled = sorted(filled, key=self._worth)[:MAX_COMBINED]
        decoders.sort(key=lambda decoder: decode_terms(decoder, load).total_s)
        for decoder in decoders[:MAX_COMBINED]:
            num_moved = max(0, load.num_tokens - decoder.computer.num_held_tokens)
            for each in filled:
                prefill, decode = each.computer.worker, decoder.computer.worker
                if field.are_pair(decode, prefill):
                    handoff_s = self._known.model.handoff_s(prefill, decode, num_moved)
                    candidates.append(remote(each, decoder, handoff_s, load))
        return candidates

    def _worth(self, filled: Filled) -> tuple[float, float]:
        num_held_tokens = filled.num_held_tokens if self._only_prefix else 0
        return (-num_held_tokens, filled.terms.total_s)


def _total_s(candidate: Candidate) -> float:
    return candidate.terms.total_s
