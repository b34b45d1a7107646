"""A scheduler's harness with sequences of several accounts: shares, classes and quotas, at every step."""

from collections import defaultdict
from math import inf

from baton.engine.scheduler.sequence import Batch, Plan, Sequence, SequenceKey, SequenceStatus
from baton.request import StepOutput
from baton.tenants import Quotas, SchedulingKey
from tests.scheduling import Harness


def scheduling_key(weight: float = 1.0, rank: int = 0, max_kv_pages: int | None = None) -> SchedulingKey:
    return SchedulingKey(weight=weight, rank=rank, quotas=Quotas(max_kv_pages=max_kv_pages))


class AccountHarness(Harness):
    """Sequences come with their pages to be computed here; nothing is brought, kept or leased."""

    def step(self) -> tuple[Plan, Batch, list[StepOutput]]:
        asked = set(self.scheduler._to_preempt)
        self._check_preempted(self.scheduler.plan(), asked)
        quotas = self.quotas()  # a sequence that ends in the step takes its own along
        stepped = super().step()
        self._check_holdings(quotas)
        return stepped

    def held_pages(self) -> dict[str, set[int]]:
        """By account, from nothing but the tables of its sequences."""
        held: dict[str, set[int]] = defaultdict(set)
        for sequence in self.live.values():
            held[sequence.scheduling_key].update(sequence.page_table)
        return held

    def shares(self) -> dict[str, float]:
        """Pages that each account with a sequence is due."""
        weights = {each.scheduling_key: each.share.weight for each in self.live.values()}
        return {
            name: self.pool.num_pages * weight / sum(weights.values()) for name, weight in weights.items()
        }

    def quotas(self) -> dict[str, int]:
        """The largest that any sequence of each account came with."""
        quotas: dict[str, int] = defaultdict(int)
        for each in self.live.values():
            quota = int(min(each.max_kv_pages, self.pool.num_pages))
            quotas[each.scheduling_key] = max(quotas[each.scheduling_key], quota)
        return quotas

    def _check_holdings(self, quotas: dict[str, int]) -> None:
        held = self.held_pages()
        for name, pages in held.items():
            if any(
                each.status is SequenceStatus.ENDING and each.scheduling_key == name
                for each in self.live.values()
            ):
                continue  # it gives no page to the quota of the others before its last token has come
            assert len(pages) <= quotas[name], f"{name!r} holds {len(pages)} pages of {quotas[name]}"
        counted = {name: num_pages for name, num_pages in self.pool.accounts.num_pages.items() if num_pages}
        assert counted == {name: len(pages) for name, pages in held.items() if pages}

    def _check_preempted(self, plan: Plan, asked: set[SequenceKey]) -> None:
        """The lowest class gives first, and no key within its share gives to a key beyond its own."""
        victims = [self.live[key] for key in plan.preempted if key not in asked]
        others = [each for key, each in self.live.items() if key not in plan.preempted]
        holders = [
            each
            for each in others
            if each.page_table and each.key not in plan.admitted and each.status is not SequenceStatus.ENDING
        ]
        for victim in victims:
            if victim.max_kv_pages < inf:
                continue  # it may have been for its own account
            assert all(each.rank[0] <= victim.rank[0] for each in holders), "a lower class kept its pages"
            assert any(self._may_take(each, victim) for each in others), f"{victim.key} was robbed"

    def _may_take(self, taker: Sequence, victim: Sequence) -> bool:
        if taker.rank[0] != victim.rank[0] or taker.share is victim.share:
            return taker.rank < victim.rank
        held, shares = self.held_pages(), self.shares()
        is_over = {name: len(pages) > shares[name] for name, pages in held.items()}
        return is_over[victim.scheduling_key] or not is_over[taker.scheduling_key]
