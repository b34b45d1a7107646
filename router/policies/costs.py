"""What an attempt would cost at each of several pairs of workers, in seconds: pure functions.

    wait for the prompts before it, and for pages from a peer meanwhile; compute what is missing;
    hand the pages over, as far as that is not hidden; join the batch;
    and what those who are there already, or come soon, lose by it: a second of any client counts the same.

A prompt whose tenant is owed work delays only others like it, of those that come soon: the rest is behind it
wherever it goes.

Computing the prompt where it is decoded is one more candidate: nothing is handed over, and the batch waits,
as long as its sequences last. Where prompts are computed anyway, it waits for those.
A prefix that only a busy worker holds is fetched or computed elsewhere when that is cheaper, and found there
by its next reader: that is how hot prefixes spread.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final, TypeAlias

import msgspec

from baton.messages.workers import WorkerRole
from baton.router.index.match import Holdings
from baton.router.index.prefix_index import PrefixIndex
from baton.router.index.prompt_keys import Family, family_of
from baton.router.membership import Member
from baton.router.policies.prompts_ahead import LeadOf

Kin: TypeAlias = tuple[str, str]  # fingerprint, kv_dtype: only of the same are pages of use to a worker

# Seconds; a new token; a pair of a new token and one that it attends to. See router/policies/cost_model.py.
Coefficients: TypeAlias = tuple[float, ...]
TIE: Final = 0.02  # costs this close, as a share, are alike: predictions are no better


class CostTerms(msgspec.Struct, frozen=True, gc=False):
    """Seconds."""

    queue_s: float = 0.0  # behind other prompts
    pull_s: float = 0.0  # of a prefix from a peer, as far as the queue does not hide it
    compute_s: float = 0.0
    handoff_s: float = 0.0
    join_s: float = 0.0
    harm_s: float = 0.0  # lost by other requests, together
    crowd_s: float = 0.0  # lost by the prompts that will wait behind this one

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.pull_s + self.compute_s

    @property
    def total_s(self) -> float:
        ttft_s = self.queue_s + self.pull_s + self.compute_s
        return ttft_s + self.handoff_s + self.join_s + self.harm_s + self.crowd_s


class PrefillCandidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that could compute the prompt."""

    worker: str
    wait_s: float  # until it could begin
    num_held_tokens: int  # of the prompt, that it has
    coefficients: Coefficients  # of what computing takes
    kin: Kin = ("", "")


class PullCandidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that holds the first tokens of the prompt, for others to pull."""

    worker: str
    num_tokens: int
    pull_s: Callable[[str, int], float]  # that so many tokens take another worker
    kin: Kin = ("", "")


class DecodeCandidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that could decode, and perhaps compute the prompt too."""

    computer: PrefillCandidate
    num_held_up: int  # sequences whose tokens would wait for a prompt, as far as they count
    room_s: float  # until there is room for it
    join_s: float  # that, and until a step of the batch ends
    harm_s: float  # that its tokens cost who is there
    patience_s: float = inf  # until they have ended, beyond what they wait for anyway

    @property
    def total_s(self) -> float:
        """Of decoding there alone."""
        return self.join_s + self.harm_s

    def harm_of_s(self, compute_s: float) -> float:
        """The same, and what they lose while a prompt is computed there."""
        return self.harm_s + self.num_held_up * min(compute_s, self.patience_s)


class CandidateLoad(msgspec.Struct, frozen=True, gc=False):
    """What the prompt is, and what the cluster has to do anyway."""

    num_tokens: int
    num_output_tokens: int  # that are expected to be generated
    crowd_rate: float  # prompts a second that come to a worker, and more where these hold up others in turn
    lead: float | None = None  # of its tenant; see router/policies/prompts_ahead.py
    lead_of: LeadOf | None = None


class FilledCandidate(msgspec.Struct, frozen=True, gc=False):
    """What the prompt costs where it is computed."""

    total_s: float
    computer: PrefillCandidate
    source: str
    num_held_tokens: int
    num_new_tokens: int
    pull_s: float
    compute_s: float
    crowd_s: float


class PairCandidate(msgspec.Struct, frozen=True, gc=False):
    """A worker or a pair of them, and what they cost together: term by term only for who asks."""

    total_s: float
    prefill: str  # "": the decode worker computes the prompt
    computer: str  # the worker that computes it
    filled: FilledCandidate
    decoder: DecodeCandidate
    handoff_s: float = 0.0

    @property
    def decode(self) -> str:
        return self.decoder.computer.worker

    @property
    def source(self) -> str:
        """Of a prefix to be pulled; "": none."""
        return self.filled.source

    @property
    def num_held_tokens(self) -> int:
        """That need not be computed."""
        return self.filled.num_held_tokens

    @property
    def num_new_tokens(self) -> int:
        """That are computed."""
        return self.filled.num_new_tokens

    @property
    def terms(self) -> CostTerms:
        filled, decoder = self.filled, self.decoder
        join_s, harm_s = decoder.join_s, decoder.harm_s
        if not self.prefill:  # whoever is in that batch waits for the prompt, and it for no step of theirs
            join_s, harm_s = decoder.room_s, decoder.harm_of_s(filled.compute_s)
        return CostTerms(
            filled.computer.wait_s,
            filled.pull_s,
            filled.compute_s,
            self.handoff_s,
            join_s,
            harm_s,
            filled.crowd_s,
        )


def fill(
    computers: Sequence[PrefillCandidate], load: CandidateLoad, sources: Sequence[PullCandidate]
) -> list[FilledCandidate]:
    """Of each the cheapest of computing all that is missing and of pulling some of it first.

    Flat, as it is most of what a decision does: nothing is called for what a line can say.
    """
    num_tokens, crowd_rate = load.num_tokens, load.crowd_rate
    last = num_tokens - 1  # which is computed wherever the others come from
    offers = []
    for source in sources:
        num_there = min(source.num_tokens, last)
        num_left = num_tokens - num_there
        num_pairs = num_left * (num_tokens - 0.5 * num_left)
        offers.append((source.worker, source.kin, num_there, num_left, num_pairs, source.pull_s))
    filled = []
    for computer in computers:
        worker, wait_s, num_held = computer.worker, computer.wait_s, computer.num_held_tokens
        fixed_s, token_s, pair_s = computer.coefficients
        held = num_held if num_held < last else last
        num_new, pull_s, pulled_from = num_tokens - held, 0.0, ""
        compute_s = fixed_s + num_new * (token_s + pair_s * (num_tokens - 0.5 * num_new))
        # Whoever comes before this one is done waits that much longer.
        crowd_s = compute_s * (wait_s + compute_s) * crowd_rate
        least_s = compute_s + crowd_s
        for holder, kin, num_there, num_left, num_pairs, pull_s_of in offers:
            if num_there <= num_held or holder == worker or kin != computer.kin:
                continue
            left_s = fixed_s + num_left * token_s + num_pairs * pair_s
            left_crowd_s = left_s * (wait_s + left_s) * crowd_rate
            if left_s + left_crowd_s >= least_s:
                continue  # however quick it comes
            shown_s = pull_s_of(worker, num_there - num_held) - wait_s
            if shown_s < 0.0:
                shown_s = 0.0
            if shown_s + left_s + left_crowd_s < least_s:
                held, num_new, pulled_from = num_there, num_left, holder
                pull_s, compute_s, crowd_s = shown_s, left_s, left_crowd_s
                least_s = pull_s + compute_s + crowd_s
        each = FilledCandidate(
            wait_s + least_s, computer, pulled_from, held, num_new, pull_s, compute_s, crowd_s
        )
        filled.append(each)
    return filled


def local(filled: FilledCandidate, decoder: DecodeCandidate) -> PairCandidate:
    """The prompt computed where it is decoded."""
    harm_s = decoder.harm_of_s(filled.compute_s)
    return PairCandidate(
        filled.total_s + decoder.room_s + harm_s, "", filled.computer.worker, filled, decoder
    )


def remote(filled: FilledCandidate, decoder: DecodeCandidate, handoff_s: float) -> PairCandidate:
    total_s = filled.total_s + handoff_s + decoder.join_s + decoder.harm_s
    prefill = filled.computer.worker
    return PairCandidate(total_s, prefill, prefill, filled, decoder, handoff_s)


# Of candidates; a random number; what was given to a worker lately, by any measure.
Select: TypeAlias = Callable[[Sequence[PairCandidate], int, Callable[[str], float]], PairCandidate]


def cheapest(
    candidates: Sequence[PairCandidate], random: int, given: Callable[[str], float]
) -> PairCandidate:
    """Of two that are drawn from those that cost about the same, the one whose computer was given less.

    Drawn, as what all took for the best would not be it for long. Waiting for what a sibling computes costs
    the same as computing it again: who computes less goes first.
    """
    least_s = min([each.total_s for each in candidates])
    tie_s = least_s * TIE
    most_s = least_s + tie_s
    equals = [each for each in candidates if each.total_s <= most_s]
    if len(equals) > 1:
        most_s = min([each.filled.compute_s for each in equals]) + tie_s
        equals = [each for each in equals if each.filled.compute_s <= most_s]
    one, other = equals[random % len(equals)], equals[random // len(equals) % len(equals)]
    return other if given(other.computer) < given(one.computer) else one


def longest(candidates: Sequence[PairCandidate], random: int, given: Callable[[str], float]) -> PairCandidate:
    """Where most of the prompt is held; among equals the least waiting. Not local where there are others."""
    remotes = [candidate for candidate in candidates if candidate.prefill] or candidates
    ranks = [(-each.num_held_tokens, each.filled.computer.wait_s) for each in remotes]
    best = min(ranks)
    equals = [each for each, rank in zip(remotes, ranks, strict=True) if rank == best]
    return equals[random % len(equals)]


# The workers of one role that could serve an attempt, and who of them holds most of a prompt.


class WorkerView(msgspec.Struct, frozen=True, gc=False):
    """What every decision asks of a worker, and no decision changes."""

    id: str
    family: Family  # of equal ones the same object, and so is kin: what one reads is warm for the next
    kin: Kin
    page_size: int
    num_slots: int  # of KV, at least 1
    max_num_seqs: int  # at least 1
    max_num_batched_tokens: int  # that a step computes; 0: unknown
    is_prefill: bool
    slot: int  # in the index; 0 where it does not know it
    slot_bit: int  # 0: the index does not know it


class _SameLayout:
    """Those of a side that name pages alike."""

    __slots__ = ("by_slot", "slots")

    def __init__(self) -> None:
        self.by_slot: dict[int, WorkerView] = {}
        self.slots = 0  # a bit for each


class WorkerPool:
    """Made once for a membership: of a thousand workers nobody is asked one by one what it holds."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.families: Sequence[Family] = list({family_of(member.worker): None for member in members})
        self.by_id: dict[str, WorkerView] = {}  # as `stations` has made them
        self._stations: list[WorkerView] = []
        self._kindred: dict[Family, _SameLayout] = {}
        self._version = -1

    def __len__(self) -> int:
        return len(self.members)

    def stations(self, index: PrefixIndex) -> Sequence[WorkerView]:
        """In the members' order."""
        if self._version != index.version:
            self._version = index.version
            shared = {family: (family, family[:2]) for family in self.families}
            self._stations = [_worker_view(member, shared, index) for member in self.members]
            self.by_id = {worker_view.id: worker_view for worker_view in self._stations}
            self._kindred = {family: _SameLayout() for family in self.families}
            for worker_view in self._stations:
                if worker_view.slot_bit:
                    kindred = self._kindred[worker_view.family]
                    kindred.by_slot[worker_view.slot] = worker_view
                    kindred.slots |= worker_view.slot_bit
        return self._stations

    def holders(self, family: Family, holdings: Holdings, limit: int, first: WorkerView) -> list[WorkerView]:
        """Of this family: at most so many, who hold some of a prompt, and none that is left out holds more.

        holdings: of the family's keys, from the index that `stations` was asked with. first: where the search
        among equals begins.
        """
        kindred = self._kindred[family]
        slots = holdings.most(kindred.slots, limit, first.slot)
        return [kindred.by_slot[slot] for slot in slots]


def _worker_view(
    member: Member, shared: Mapping[Family, tuple[Family, Kin]], index: PrefixIndex
) -> WorkerView:
    worker, slot = member.worker, index.slot(member.id)
    family, kin = shared[family_of(worker)]
    return WorkerView(
        id=member.id,
        family=family,
        kin=kin,
        page_size=worker.page_size,
        num_slots=max(1, worker.num_pages * worker.page_size),
        max_num_seqs=max(1, worker.max_num_seqs),
        max_num_batched_tokens=worker.max_num_batched_tokens,
        is_prefill=worker.role is WorkerRole.PREFILL,
        slot=slot or 0,
        slot_bit=0 if slot is None else 1 << slot,
    )
