"""The candidates for a prompt, pairs of workers, and their costs in seconds.

The cost of an attempt at a pair, in seconds, is

    wait for the prompts before it, and meanwhile for pages from a peer; compute the missing tokens;
    hand the pages over, as far as computing does not hide that; join the batch;
    plus the delay of all other requests: a second counts the same for every client.

A prompt of a tenant with a deficit delays only later prompts of tenants with a deficit: all others come after
it at any worker. Computing the prompt on its decode worker is one more candidate. Nothing is handed over
then, and the running batch waits while the prompt is computed. A prefix that only a busy worker holds is
pulled or computed elsewhere when that is cheaper, and later prompts find it there: hot prefixes spread by
themselves.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Final, TypeAlias

import msgspec

TIE: Final = 0.02  # costs that differ by a smaller share are equal: predictions are no better
# Fingerprint, kv_dtype: workers can use each other's pages of one format.
PageFormat: TypeAlias = tuple[str, str]
Coefficients: TypeAlias = tuple[float, ...]  # of a prefill, as PREFILL_PRIOR


class CostTerms(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The parts of a pair's cost, in seconds."""

    queue_s: float = 0.0  # behind other prompts
    # To bring a prefix to the device, from a peer or from the worker's host memory and disk, less the time in
    # the queue.
    pull_s: float = 0.0
    compute_s: float = 0.0
    handoff_s: float = 0.0
    join_s: float = 0.0
    decode_delay_s: float = 0.0  # the delay of running requests, summed
    queue_delay_s: float = 0.0  # the delay of later prompts behind this one

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.queue_s + self.pull_s + self.compute_s

    @property
    def total_s(self) -> float:
        """The sum of all terms."""
        return self.ttft_s + self.handoff_s + self.join_s + self.decode_delay_s + self.queue_delay_s


class PrefillCandidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that could compute the prompt."""

    worker: str
    wait_s: float  # until it could begin
    num_held_tokens: int  # of the prompt, in its prefix cache
    coefficients: Coefficients  # of its prefill time
    page_format: PageFormat = ("", "")
    load_s: float = 0.0  # to bring the held tokens to its device from host memory and disk


class PullCandidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that holds the first tokens of the prompt, for others to pull."""

    worker: str
    num_tokens: int
    pull_s: Callable[[str, int], float]  # (pulling worker, number of tokens) -> seconds
    page_format: PageFormat = ("", "")
    load_s: float = 0.0  # for the peer to bring the tokens to its own device before the pull


class DecodeCandidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that could decode, and perhaps compute the prompt too."""

    as_prefill: PrefillCandidate  # the same worker, as the one that computes the prompt
    num_delayed: int  # running sequences that a prompt computed here would delay
    room_s: float  # until there is room for the attempt
    join_s: float  # `room_s`, and until a step of the batch ends
    decode_delay_s: float  # the delay that the attempt's tokens cost the running sequences
    patience_s: float = inf  # the longest delay of one of them, beyond the wait that it has anyway

    @property
    def total_s(self) -> float:
        """The cost of decoding here, without the prompt."""
        return self.join_s + self.decode_delay_s

    def local_decode_delay_s(self, compute_s: float) -> float:
        """`decode_delay_s` and the delay of running sequences while the prompt is computed here."""
        return self.decode_delay_s + self.num_delayed * min(compute_s, self.patience_s)


class PromptCost(msgspec.Struct, frozen=True, gc=False):
    """The cost of the prompt at the worker that computes it."""

    total_s: float
    candidate: PrefillCandidate
    source: str
    num_held_tokens: int
    num_new_tokens: int
    pull_s: float
    compute_s: float
    queue_delay_s: float


class PairCandidate(msgspec.Struct, frozen=True, gc=False):
    """A pair of workers, or a decode worker alone, with their cost. `terms` is computed on demand."""

    total_s: float
    prefill: str  # "": the decode worker computes the prompt
    prompt_cost: PromptCost
    decode_candidate: DecodeCandidate
    handoff_s: float = 0.0

    @property
    def decode(self) -> str:
        """The id of the decode worker."""
        return self.decode_candidate.as_prefill.worker

    @property
    def computed_by(self) -> str:
        """The id of the worker that computes the prompt."""
        return self.prompt_cost.candidate.worker

    @property
    def source(self) -> str:
        """The worker that a prefix is pulled from; "": none."""
        return self.prompt_cost.source

    @property
    def num_held_tokens(self) -> int:
        """Tokens of the prompt that are not computed."""
        return self.prompt_cost.num_held_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens of the prompt that are computed."""
        return self.prompt_cost.num_new_tokens

    @property
    def terms(self) -> CostTerms:
        """The cost by its parts."""
        prompt_cost, decode = self.prompt_cost, self.decode_candidate
        join_s, decode_delay_s = decode.join_s, decode.decode_delay_s
        if not self.prefill:  # the batch waits for the prompt, and the prompt for no step of the batch
            join_s, decode_delay_s = decode.room_s, decode.local_decode_delay_s(prompt_cost.compute_s)
        return CostTerms(
            queue_s=prompt_cost.candidate.wait_s,
            pull_s=prompt_cost.pull_s,
            compute_s=prompt_cost.compute_s,
            handoff_s=self.handoff_s,
            join_s=join_s,
            decode_delay_s=decode_delay_s,
            queue_delay_s=prompt_cost.queue_delay_s,
        )


def prompt_costs(
    prefills: Sequence[PrefillCandidate],
    num_tokens: int,
    sources: Sequence[PullCandidate] = (),
    arrival_rate: float = 0.0,
) -> list[PromptCost]:
    """Return the cheapest way for each worker: compute all missing tokens, or first pull some from a source.

    arrival_rate: prompts that arrive at a worker a second, and more where these delay others in turn. Calls
    are inlined: this function takes most of the time of a decision.
    """
    last = num_tokens - 1  # the last token is always computed
    offers = []
    for source in sources:
        num_there = min(source.num_tokens, last)
        num_left = num_tokens - num_there
        num_pairs = num_left * (num_tokens - 0.5 * num_left)
        offer = (source.worker, source.page_format, num_there, num_left, num_pairs, source.pull_s)
        offers.append((*offer, source.load_s))
    costs = []
    for prefill in prefills:
        worker, wait_s, num_held = prefill.worker, prefill.wait_s, prefill.num_held_tokens
        fixed_s, token_s, pair_s = prefill.coefficients
        held = num_held if num_held < last else last
        num_new, pulled_from = num_tokens - held, ""
        pull_s = prefill.load_s - wait_s if prefill.load_s > wait_s else 0.0
        compute_s = fixed_s + num_new * (token_s + pair_s * (num_tokens - 0.5 * num_new))
        # Prompts that arrive before this one is done wait that much longer.
        queue_delay_s = compute_s * (wait_s + compute_s) * arrival_rate
        least_s = pull_s + compute_s + queue_delay_s
        for holder, page_format, num_there, num_left, num_pairs, pull_s_of, load_s in offers:
            if num_there <= num_held or holder == worker or page_format != prefill.page_format:
                continue
            left_s = fixed_s + num_left * token_s + num_pairs * pair_s
            left_queue_delay_s = left_s * (wait_s + left_s) * arrival_rate
            if left_s + left_queue_delay_s >= least_s:
                continue  # however fast the pull is
            shown_s = load_s + pull_s_of(worker, num_there - num_held) - wait_s
            if shown_s < 0.0:
                shown_s = 0.0
            if shown_s + left_s + left_queue_delay_s < least_s:
                held, num_new, pulled_from = num_there, num_left, holder
                pull_s, compute_s, queue_delay_s = shown_s, left_s, left_queue_delay_s
                least_s = pull_s + compute_s + queue_delay_s
        total_s = wait_s + least_s
        costs.append(
            PromptCost(total_s, prefill, pulled_from, held, num_new, pull_s, compute_s, queue_delay_s)
        )
    return costs


def local_pair(cost: PromptCost, decode: DecodeCandidate) -> PairCandidate:
    """Return the candidate that computes the prompt on its decode worker."""
    total_s = cost.total_s + decode.room_s + decode.local_decode_delay_s(cost.compute_s)
    return PairCandidate(total_s, "", cost, decode)


def remote_pair(cost: PromptCost, decode: DecodeCandidate, handoff_s: float) -> PairCandidate:
    """Return the candidate that computes the prompt on a prefill worker and hands it over in `handoff_s`."""
    total_s = cost.total_s + handoff_s + decode.join_s + decode.decode_delay_s
    return PairCandidate(total_s, cost.candidate.worker, cost, decode, handoff_s)


def cheapest(
    candidates: Sequence[PairCandidate], random: int, given: Callable[[str], float]
) -> PairCandidate:
    """Return one of the cheapest candidates: of two drawn at random, that with the less used worker.

    Two candidates are drawn because every router would otherwise send to the one best worker. Among equal
    totals the candidates with less to compute come first: waiting for a sibling's prefix costs the same as
    computing the prefix again.
    """
    least_s = min([each.total_s for each in candidates])
    tie_s = least_s * TIE
    most_s = least_s + tie_s
    equals = [each for each in candidates if each.total_s <= most_s]
    if len(equals) > 1:
        most_s = min([each.prompt_cost.compute_s for each in equals]) + tie_s
        equals = [each for each in equals if each.prompt_cost.compute_s <= most_s]
    one, other = equals[random % len(equals)], equals[random // len(equals) % len(equals)]
    if one is other:
        return one
    return other if given(other.computed_by) < given(one.computed_by) else one


def longest(candidates: Sequence[PairCandidate], random: int) -> PairCandidate:
    """Return the candidate that holds most of the prompt; among equals the one that waits least.

    Computing on the decode worker is chosen only when there is no other candidate.
    """
    remotes = [candidate for candidate in candidates if candidate.prefill] or candidates
    ranks = [(-each.num_held_tokens, each.prompt_cost.candidate.wait_s) for each in remotes]
    best = min(ranks)
    equals = [each for each, rank in zip(remotes, ranks, strict=True) if rank == best]
    return equals[random % len(equals)]
