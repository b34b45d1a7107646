"""What an attempt would cost at each of several pairs of workers, in seconds: pure functions.

    wait for the prompts before it, and for pages from a peer meanwhile; compute what is missing;
    hand the pages over, as far as that is not hidden; join the batch;
    and what those who are there already lose by it: a second of any client counts the same.

Computing the prompt where it is decoded is one more candidate: nothing is handed over, and the batch waits.
A prefix that only a busy worker holds is fetched or computed elsewhere when that is cheaper, and found there
by its next reader: that is how hot prefixes spread.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import msgspec

Kin: TypeAlias = tuple[str, str]  # fingerprint, kv_dtype: only of the same are pages of use to a worker

# Seconds; a new token; a pair of a new token and one that it attends to. See cost_model.py.
Coefficients: TypeAlias = tuple[float, ...]

TIE: Final = 0.02  # costs this close, as a share, are alike: predictions are no better


class Terms(msgspec.Struct, frozen=True, gc=False):
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


class Candidate(msgspec.Struct, frozen=True, gc=False):
    decode: str
    prefill: str  # "": the decode worker computes the prompt
    source: str  # of a prefix to be pulled; "": none
    num_held_tokens: int  # that need not be computed
    num_new_tokens: int  # that are
    terms: Terms

    @property
    def computer(self) -> str:
        """The worker that computes the prompt."""
        return self.prefill or self.decode


class Computer(msgspec.Struct, frozen=True, gc=False):
    """A worker that could compute the prompt."""

    worker: str
    wait_s: float  # until it could begin
    num_held_tokens: int  # of the prompt, that it has
    coefficients: Coefficients  # of what computing takes
    kin: Kin = ("", "")


class Source(msgspec.Struct, frozen=True, gc=False):
    """A worker that holds the first tokens of the prompt, for others to pull."""

    worker: str
    num_tokens: int
    pull_s: Callable[[str, int], float]  # that so many tokens take another worker
    kin: Kin = ("", "")


class Decoder(msgspec.Struct, frozen=True, gc=False):
    """A worker that could decode, and perhaps compute the prompt too; what decoding there costs alone."""

    computer: Computer
    num_running: int
    room_s: float  # until there is room for it
    join_s: float  # that, and until a step of the batch ends
    harm_s: float  # that its tokens cost who is there

    @property
    def total_s(self) -> float:
        return self.join_s + self.harm_s


class Load(msgspec.Struct, frozen=True, gc=False):
    """What the prompt is, and what the cluster has to do anyway."""

    num_tokens: int
    num_output_tokens: int  # that are expected to be generated
    crowd_rate: float  # prompts a second that come to a worker, and more where these hold up others in turn
    lead: float | None = None  # of its tenant; see prompts_ahead.py


class Filled(msgspec.Struct, frozen=True, gc=False):
    """What the prompt costs where it is computed."""

    total_s: float
    computer: Computer
    source: str
    num_held_tokens: int
    pull_s: float
    compute_s: float
    crowd_s: float


def fill(computers: Sequence[Computer], load: Load, sources: Sequence[Source]) -> list[Filled]:
    """Of each the cheapest of computing all that is missing and of pulling some of it first.

    Flat, as it is most of what a decision does: nothing is called for what a line can say.
    """
    num_tokens, crowd_rate = load.num_tokens, load.crowd_rate
    last = num_tokens - 1  # which is computed wherever the others come from
    filled = []
    for computer in computers:
        wait_s, num_held = computer.wait_s, computer.num_held_tokens
        fixed_s, token_s, pair_s = computer.coefficients
        held = num_held if num_held < last else last
        num_new, pull_s, source = num_tokens - held, 0.0, ""
        compute_s = fixed_s + num_new * (token_s + pair_s * (num_tokens - 0.5 * num_new))
        crowd_s = compute_s * (wait_s + compute_s) * crowd_rate
        for each in sources:
            num_there = each.num_tokens if each.num_tokens < last else last
            if num_there <= num_held or each.worker == computer.worker or each.kin != computer.kin:
                continue
            shown_s = each.pull_s(computer.worker, num_there - num_held) - wait_s
            if shown_s < 0.0:
                shown_s = 0.0
            num_left = num_tokens - num_there
            left_s = fixed_s + num_left * (token_s + pair_s * (num_tokens - 0.5 * num_left))
            # Whoever comes before this one is done waits that much longer.
            left_crowd_s = left_s * (wait_s + left_s) * crowd_rate
            if shown_s + left_s + left_crowd_s < pull_s + compute_s + crowd_s:
                held, source = num_there, each.worker
                pull_s, compute_s, crowd_s = shown_s, left_s, left_crowd_s
        total_s = wait_s + pull_s + compute_s + crowd_s
        filled.append(Filled(total_s, computer, source, held, pull_s, compute_s, crowd_s))
    return filled


def local(filled: Filled, decoder: Decoder, load: Load) -> Candidate:
    """The prompt computed where it is decoded: whoever is in that batch waits for it."""
    computer, held = filled.computer, filled.num_held_tokens
    harm_s = decoder.harm_s + decoder.num_running * filled.compute_s
    terms = Terms(
        computer.wait_s, filled.pull_s, filled.compute_s, 0.0, decoder.room_s, harm_s, filled.crowd_s
    )
    return Candidate(computer.worker, "", filled.source, held, load.num_tokens - held, terms)


def local_total_s(filled: Filled, decoder: Decoder) -> float:
    """Of that candidate."""
    return filled.total_s + decoder.room_s + decoder.harm_s + decoder.num_running * filled.compute_s


def remote(filled: Filled, decoder: Decoder, handoff_s: float, load: Load) -> Candidate:
    computer, held = filled.computer, filled.num_held_tokens
    join_s, harm_s = decoder.join_s, decoder.harm_s
    terms = Terms(computer.wait_s, filled.pull_s, filled.compute_s, handoff_s, join_s, harm_s, filled.crowd_s)
    decode = decoder.computer.worker
    return Candidate(decode, computer.worker, filled.source, held, load.num_tokens - held, terms)


# Of candidates; a random number; what was given to a worker lately, by any measure.
Select: TypeAlias = Callable[[Sequence[Candidate], int, Callable[[str], float]], Candidate]


def cheapest(candidates: Sequence[Candidate], random: int, given: Callable[[str], float]) -> Candidate:
    """Of two that are drawn from those that cost about the same, the one whose computer was given less.

    Drawn, as what all took for the best would not be it for long. Waiting for what a sibling computes costs
    the same as computing it again: who computes less goes first.
    """
    totals_s = [candidate.terms.total_s for candidate in candidates]
    least_s = min(totals_s)
    tie_s = least_s * TIE
    most_s = least_s + tie_s
    equals = [each for each, total_s in zip(candidates, totals_s, strict=True) if total_s <= most_s]
    if len(equals) > 1:
        most_s = min(each.terms.compute_s for each in equals) + tie_s
        equals = [each for each in equals if each.terms.compute_s <= most_s]
    one, other = equals[random % len(equals)], equals[random // len(equals) % len(equals)]
    return other if given(other.computer) < given(one.computer) else one


def longest(candidates: Sequence[Candidate], random: int, given: Callable[[str], float]) -> Candidate:
    """Where most of the prompt is held; among equals the least waiting. Not local where there are others."""
    remotes = [candidate for candidate in candidates if candidate.prefill] or candidates
    best = min((-each.num_held_tokens, each.terms.queue_s) for each in remotes)
    equals = [each for each in remotes if (-each.num_held_tokens, each.terms.queue_s) == best]
    return equals[random % len(equals)]
