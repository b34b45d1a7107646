"""What an attempt would cost at each of several pairs of workers, in seconds: pure functions.

    wait for the prompts before it, and for pages from a peer meanwhile; compute what is missing;
    hand the pages over, as far as that is not hidden; join the batch;
    and what those who are there already lose by it: a second of any client counts the same.

Computing the prompt where it is decoded is one more candidate: nothing is handed over, and the batch waits.
A prefix that only a busy worker holds is fetched or computed elsewhere when that is cheaper, and found there
by its next reader: that is how hot prefixes spread.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

Kin: TypeAlias = tuple[str, str]  # fingerprint, kv_dtype: only of the same are pages of use to a worker

TIE: Final = 0.02  # costs this close, as a share, are alike: predictions are no better


class Terms(NamedTuple):
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
        return sum(self)


class Candidate(NamedTuple):
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


class Computer(NamedTuple):
    """A worker that could compute the prompt."""

    worker: str
    wait_s: float  # until it could begin
    num_held_tokens: int  # of the prompt, that it has
    compute_s: Callable[[int, int], float]  # new tokens, all tokens
    kin: Kin = ("", "")


class Source(NamedTuple):
    """A worker that holds the first tokens of the prompt, for others to pull."""

    worker: str
    num_tokens: int
    pull_s: Callable[[str, str, int], float]  # source, worker, tokens
    kin: Kin = ("", "")


class Decoder(NamedTuple):
    """A worker that could decode, and perhaps compute the prompt too."""

    computer: Computer
    num_running: int
    step_s: float
    room_s: float  # until there is room for it
    token_harm_s: float  # that it lengthens each step by


class Load(NamedTuple):
    """What the prompt is, and what the cluster has to do anyway."""

    num_tokens: int
    num_output_tokens: int  # that are expected to be generated
    crowd_rate: float  # prompts a second that come to a worker, and more where these hold up others in turn


class Filled(NamedTuple):
    """What the prompt costs where it is computed."""

    computer: Computer
    source: str
    num_held_tokens: int
    terms: Terms


def fill(computer: Computer, load: Load, sources: Sequence[Source]) -> Filled:
    """The cheapest of computing all that is missing and of pulling some of it first."""
    last = load.num_tokens - 1  # which is computed wherever the others come from
    held = min(computer.num_held_tokens, last)
    compute_s, pull_s, source = computer.compute_s(load.num_tokens - held, load.num_tokens), 0.0, ""
    least_s = compute_s + _crowd_s(compute_s, computer, load)
    for each in sources:
        num_tokens = min(each.num_tokens, last)
        if num_tokens <= computer.num_held_tokens or each.worker == computer.worker:
            continue
        if each.kin != computer.kin:
            continue
        pulled_s = each.pull_s(each.worker, computer.worker, num_tokens - computer.num_held_tokens)
        shown_s = max(0.0, pulled_s - computer.wait_s)
        left_s = computer.compute_s(load.num_tokens - num_tokens, load.num_tokens)
        total_s = shown_s + left_s + _crowd_s(left_s, computer, load)
        if total_s < least_s:
            least_s, held, source, compute_s, pull_s = total_s, num_tokens, each.worker, left_s, shown_s
    crowd_s = _crowd_s(compute_s, computer, load)
    terms = Terms(computer.wait_s, pull_s, compute_s, crowd_s=crowd_s)
    return Filled(computer, source, held, terms)


def _crowd_s(compute_s: float, computer: Computer, load: Load) -> float:
    """Whoever comes before this one is done waits that much longer."""
    return compute_s * (computer.wait_s + compute_s) * load.crowd_rate


def decode_terms(decoder: Decoder, load: Load) -> Terms:
    """Of decoding alone."""
    harm_s = decoder.num_running * load.num_output_tokens * decoder.token_harm_s
    return Terms(join_s=decoder.room_s + 0.5 * decoder.step_s, harm_s=harm_s)


def local(decoder: Decoder, load: Load, sources: Sequence[Source]) -> Candidate:
    """The prompt computed where it is decoded: whoever is in that batch waits for it."""
    filled = fill(decoder.computer, load, sources)
    decoding = decode_terms(decoder, load)
    harm_s = decoding.harm_s + decoder.num_running * filled.terms.compute_s
    terms = filled.terms._replace(join_s=decoder.room_s, harm_s=harm_s)
    held = filled.num_held_tokens
    return Candidate(decoder.computer.worker, "", filled.source, held, load.num_tokens - held, terms)


def remote(filled: Filled, decoder: Decoder, handoff_s: float, load: Load) -> Candidate:
    decoding = decode_terms(decoder, load)
    terms = filled.terms._replace(handoff_s=handoff_s, join_s=decoding.join_s, harm_s=decoding.harm_s)
    prefill, decode, held = filled.computer.worker, decoder.computer.worker, filled.num_held_tokens
    return Candidate(decode, prefill, filled.source, held, load.num_tokens - held, terms)


# Of candidates; a random number; what was given to a worker lately, by any measure.
Select: TypeAlias = Callable[[Sequence[Candidate], int, Callable[[str], float]], Candidate]


def cheapest(candidates: Sequence[Candidate], random: int, given: Callable[[str], float]) -> Candidate:
    """Of two that are drawn from those that cost about the same, the one whose computer was given less.

    Drawn, as what all took for the best would not be it for long. Waiting for what a sibling computes costs
    the same as computing it again: who computes less goes first.
    """
    totals_s = [candidate.terms.total_s for candidate in candidates]
    tie_s = min(totals_s) * TIE
    most_s = min(totals_s) + tie_s
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
