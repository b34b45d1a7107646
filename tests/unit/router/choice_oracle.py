"""The cost of every pair of workers, term by term: a slow oracle."""

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from baton.messages.workers import WorkerRole
from baton.request import Request
from baton.router.in_flight import EXPECTED_OUTPUT_TOKENS, NewPrompt, num_kv_tokens, scheduling_class_of
from baton.router.membership import Member
from baton.router.policies.base import PolicyContext
from baton.router.policies.candidates import TIE, CostTerms
from baton.router.policies.cost import MAX_COMBINED, MAX_SOURCES
from baton.router.sliced_work import family_of


class Weighed(NamedTuple):
    """A candidate with all its terms."""

    decode: str
    prefill: str
    source: str
    num_held_tokens: int
    num_new_tokens: int
    terms: CostTerms


def cheapest_of(candidates: Sequence[Weighed], random: int) -> Weighed:
    """The choice where no worker was given anything yet."""
    tie_s = TIE * min(each.terms.total_s for each in candidates)
    equals = [each for each in candidates if each.terms.total_s <= tie_s / TIE + tie_s]
    least_s = min(each.terms.compute_s for each in equals)
    equals = [each for each in equals if each.terms.compute_s <= least_s + tie_s]
    return equals[random % len(equals)]


class ChoiceOracle:
    """The candidates of one prompt at one time. Expected pages count as held."""

    def __init__(self, context: PolicyContext, request: Request, now_s: float) -> None:
        self._context = context
        self._request = request
        self._num_tokens = request.num_tokens
        self._now_s = now_s

    def candidates(
        self, decoding: Sequence[Member], prefilling: Sequence[Member], are_pair: Callable[[str, str], bool]
    ) -> list[Weighed]:
        everybody = [*decoding, *prefilling]
        held = sorted(((self._held(each), each.id) for each in everybody if self._held(each)), reverse=True)
        members = {each.id: each for each in everybody}
        sources = [members[worker] for _, worker in held[:MAX_SOURCES]]
        locals_ = [self._local(each, self._cost(each, sources)) for each in decoding]
        cost = sorted((self._cost(each, sources) for each in prefilling), key=_total_s)
        decoders = sorted(decoding, key=lambda each: self._decoding(each).total_s)
        remotes = [
            self._remote(decoder, each)
            for decoder in decoders[:MAX_COMBINED]
            for each in cost[:MAX_COMBINED]
            if are_pair(decoder.id, each.decode)
        ]
        return [*sorted(locals_, key=_total_s)[:MAX_COMBINED], *remotes]

    def _held(self, member: Member) -> int:
        slot = self._context.index.slot(member.id)
        if slot is None:
            return 0
        keys = self._context.keys.keys(family_of(member.worker), self._request)
        return self._context.index.holdings(keys).num_pages(1 << slot) * member.worker.page_size

    def _wait_s(self, member: Member) -> float:
        account = self._context.in_flight.account(member.id)
        num_new_tokens = max(1, self._num_tokens - self._held(member))
        before = account.prompts.share_ahead_of(NewPrompt(scheduling_class_of(self._request), num_new_tokens))
        wait_s = account.wait_s(self._now_s) * before
        if member.worker.role is WorkerRole.PREFILL:
            wait_s += account.num_unknown * self._context.model.of(member.id).mean_compute_s
        return wait_s

    def _cost(self, member: Member, sources: Sequence[Member]) -> Weighed:
        """The cheapest way to compute the prompt there, without the decode."""
        held, last = self._held(member), self._num_tokens - 1
        choices = [self._computed(member, "", min(held, last), 0.0)]
        for source in sources:
            num_tokens = min(self._held(source), last)
            if num_tokens <= held or source.id == member.id:
                continue
            if family_of(source.worker)[:2] != family_of(member.worker)[:2]:
                continue
            pulled_s = self._context.model.pulls_from(source.id)(member.id, num_tokens - held)
            shown_s = max(0.0, pulled_s - self._wait_s(member))
            choices.append(self._computed(member, source.id, num_tokens, shown_s))
        return min(choices, key=_total_s)

    def _computed(self, member: Member, source: str, held: int, pull_s: float) -> Weighed:
        wait_s, num_new = self._wait_s(member), self._num_tokens - held
        compute_s = self._context.model.of(member.id).compute_s(num_new, self._num_tokens)
        terms = CostTerms(queue_s=wait_s, pull_s=pull_s, compute_s=compute_s)
        return Weighed(member.id, "", source, held, num_new, terms)

    def _decoding(self, member: Member) -> CostTerms:
        room_s, step_s = self._room_and_step_s(member)
        _, sequence_s, context_s, _ = self._context.model.of(member.id).step.coefficients
        token_delay_s = sequence_s + context_s * self._num_tokens
        decode_delay_s = (
            self._num_running(member) * (num_kv_tokens(self._request) - self._num_tokens) * token_delay_s
        )
        return CostTerms(join_s=room_s + 0.5 * step_s, decode_delay_s=decode_delay_s)

    def _room_and_step_s(self, member: Member) -> tuple[float, float]:
        worker, account = member.worker, self._context.in_flight.account(member.id)
        num_tokens, num_running = account.num_tokens + account.num_unknown_tokens, self._num_running(member)
        step_s = self._context.model.of(member.id).step.predict(1.0, num_running, num_tokens, 0.0)
        num_slots = max(1, worker.num_pages * worker.page_size)
        needed = (num_tokens + num_kv_tokens(self._request)) / num_slots
        share = max(needed, (num_running + 1) / max(1, worker.max_num_seqs))
        return max(0.0, share - 1.0) * EXPECTED_OUTPUT_TOKENS * step_s, step_s

    def _num_running(self, member: Member) -> int:
        account = self._context.in_flight.account(member.id)
        return account.num_attempts + account.num_unknown

    def _local(self, decoder: Member, cost: Weighed) -> Weighed:
        account = self._context.in_flight.account(decoder.id)
        num_decoding = sum(each.num for each in account.decoding.values()) + account.num_unknown
        decode_delay_s = self._decoding(decoder).decode_delay_s
        if num_decoding:
            num_output_tokens = sum(each.num_output_tokens for each in account.decoding.values())
            num_output_tokens += EXPECTED_OUTPUT_TOKENS * account.num_unknown
            left = 0.5 * num_output_tokens / num_decoding
            _, step_s = self._room_and_step_s(decoder)
            token_s = self._context.model.of(decoder.id).step.coefficients[3]
            num_tokens = decoder.worker.max_num_batched_tokens
            # What their tokens take where every step is full of prompts.
            last_s = left * (step_s + token_s * num_tokens) if num_tokens else inf
            anyway_s = account.wait_s(self._now_s)
            with_it_s = anyway_s + cost.terms.compute_s
            decode_delay_s += num_decoding * (min(last_s, with_it_s) - min(last_s, anyway_s))
        join_s = self._room_and_step_s(decoder)[0]
        return cost._replace(terms=replace(cost.terms, join_s=join_s, decode_delay_s=decode_delay_s))

    def _remote(self, decoder: Member, cost: Weighed) -> Weighed:
        """cost: of the prompt, with the worker that computes it as `decode`."""
        num_moved = max(0, self._num_tokens - self._held(decoder))
        handoff_s = self._context.model.handoff_s(cost.decode, decoder.id, num_moved)
        decoding = self._decoding(decoder)
        terms = replace(
            cost.terms, handoff_s=handoff_s, join_s=decoding.join_s, decode_delay_s=decoding.decode_delay_s
        )
        return cost._replace(decode=decoder.id, prefill=cost.decode, terms=terms)


def _total_s(candidate: Weighed) -> float:
    return candidate.terms.total_s
