"""Why attempts went where they went, kept for a while: predictions, and what was measured afterwards."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import asdict

from baton.clock import Clock
from baton.decision import Decision, Weighed
from baton.router.books import Key
from baton.router.costs import Candidate
from baton.times import PrefillTimes

MAX_DECISIONS: Final = 4096
MAX_ATTEMPTS: Final = 64  # told of one request
_DAY_S: Final = 86_400.0


def weighed(candidate: Candidate) -> Weighed:
    return Weighed(
        decode=candidate.decode,
        prefill=candidate.prefill,
        source=candidate.source,
        num_held_tokens=candidate.num_held_tokens,
        terms={name: min(max(value, 0.0), _DAY_S) for name, value in asdict(candidate.terms).items()},
    )


def total_s(weighed: Weighed) -> float:
    return sum(weighed.terms.values())


def regret_s(decision: Decision) -> float | None:
    """What the first token took longer than the best other pair was expected to take; None: not known."""
    others = [ttft_s(each) for each in decision.weighed if each != decision.chosen]
    if decision.first_token_s is None or not others:
        return None
    return decision.first_token_s - min(others)


def ttft_s(weighed: Weighed) -> float:
    return sum(weighed.terms.get(name, 0.0) for name in ("queue_s", "pull_s", "compute_s"))


class Kept(NamedTuple):
    decided_s: float
    decision: Decision  # less what was weighed: that is written out for who asks
    candidates: Sequence[Candidate]


class Decisions:
    """The last MAX_DECISIONS."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[Key, Kept] = OrderedDict()
        self._attempts: dict[str, list[Key]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, decision: Decision, candidates: Sequence[Candidate] = ()) -> None:
        """A key that is there already is decided anew. candidates: all, to be told to whoever asks."""
        key = (decision.request_id, decision.attempt)
        self._forget(key)
        self._kept[key] = Kept(self._clock.now_s(), decision, candidates)
        self._attempts.setdefault(decision.request_id, []).append(key)
        if len(self._kept) > MAX_DECISIONS:
            self._forget(next(iter(self._kept)))

    def get(self, key: Key) -> Decision | None:
        """Without what else was weighed."""
        kept = self._kept.get(key)
        return None if kept is None else kept.decision

    def full(self, key: Key) -> Decision:
        """Of one that is kept."""
        now_s, kept = self._clock.now_s(), self._kept[key]
        age_s, others = min(now_s - kept.decided_s, _DAY_S), tuple(map(weighed, kept.candidates))
        return msgspec.structs.replace(kept.decision, age_s=age_s, weighed=others)

    def started(self, key: Key) -> None:
        kept = self._kept.get(key)
        if kept is not None and kept.decision.first_token_s is None:
            taken_s = min(self._clock.now_s() - kept.decided_s, _DAY_S)
            decision = msgspec.structs.replace(kept.decision, first_token_s=taken_s)
            self._kept[key] = kept._replace(decision=decision)

    def measured(self, times: PrefillTimes) -> None:
        key = (times.request_id, times.attempt)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept[key] = kept._replace(decision=msgspec.structs.replace(kept.decision, measured=times))

    def of(self, request_id: str) -> Iterator[Decision]:
        for key in self._attempts.get(request_id, ())[-MAX_ATTEMPTS:]:
            yield self.full(key)

    def _forget(self, key: Key) -> None:
        if self._kept.pop(key, None) is None:
            return
        keys = self._attempts[key[0]]
        keys.remove(key)
        if not keys:
            del self._attempts[key[0]]
