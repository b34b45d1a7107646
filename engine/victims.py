"""Who gives pages when they are short, the first to give them first. Nothing here takes any.

A sequence can give pages that runs, or waits with pages that it has brought. AccountBooks has the order among
accounts, the rank is the order on one. Those that wait with pages also give them to sequences that come after
them, where these run: they may never run before one that runs has ended.
"""

from collections import Counter
from collections.abc import Container

from baton.engine.account_books import AccountBooks
from baton.engine.accounts import Account
from baton.engine.pages import PagePool
from baton.engine.sequence import Sequence, SequenceKey, SequenceStatus
from baton.engine.sequence_queues import SequenceQueues, rank_of


class Victims:
    def __init__(
        self,
        queues: SequenceQueues,
        pool: PagePool,
        books: AccountBooks,
        admitted: Container[SequenceKey],
        preempted: Container[SequenceKey],
    ) -> None:
        """admitted, preempted: by the plan so far; neither gives anything more."""
        self._queues = queues
        self._pool = pool
        self._books = books
        self._admitted = admitted
        self._preempted = preempted

    def of_running(self, sequence: Sequence, *, may_wait: bool) -> list[Sequence]:
        """For one that runs. may_wait: it is not the last hope of the step, so other accounts that wait with
        pages keep them from one that comes after."""
        turn_of = self._books.turn_of
        own, spares = turn_of(sequence), may_wait and self._books.are_several
        others = sorted(self._holders(), key=turn_of, reverse=True)
        return [other for other in others if turn_of(other) > own or not (spares or _runs(other))]

    def of_waiting(self, sequence: Sequence, num_lacking: int) -> list[Sequence]:
        """For one that does not fit although nothing runs; none when all together would not do.

        Then somebody outside holds the rest, and will let go.
        """
        others = [other for other in self._waiting_with_pages() if other is not sequence]
        return self._enough(sorted(others, key=self._books.turn_of, reverse=True), num_lacking)

    def of_newcomer(
        self, sequence: Sequence, num_pages: int, num_lacking: int, headroom_pages: int
    ) -> list[Sequence]:
        """For one that does not fit beside those that run: of lower classes, and, if its account stays within
        its share with so many pages more, of accounts that are over theirs; none when that would not do.

        headroom_pages: that are kept free for each one that runs."""
        books, account = self._books, sequence.account
        is_due = books.num_pages(account) + num_pages <= books.share(account)
        num_lost = Counter[str]()
        yielding = []
        for other in sorted(self._holders(), key=books.turn_of, reverse=True):
            is_over = is_due and books.excess(other.account, num_lost[other.account.name]) > 0
            if other.rank[0] > sequence.rank[0] or (other.rank[0] == sequence.rank[0] and is_over):
                yielding.append(other)
                num_lost[other.account.name] += len(other.page_table)
        return self._enough(yielding, num_lacking, headroom_pages)

    def of_lowest_class(self, num_lacking: int) -> list[Sequence]:
        """For better classes that run: of the lowest that runs, the longest first; all if that is too few."""
        running = [s for s in self._queues.running() if s.key not in self._preempted]
        classes = {sequence.rank[0] for sequence in running}
        if len(classes) < 2:
            return []
        lowest = [sequence for sequence in running if sequence.rank[0] == max(classes)]
        lowest.sort(key=lambda sequence: len(sequence.page_table), reverse=True)
        return self._enough(lowest, num_lacking) or lowest

    def on_account(self, account: Account) -> list[Sequence]:
        return sorted((s for s in self._holders() if s.account is account), key=rank_of, reverse=True)

    def of_own_account(self, sequence: Sequence) -> list[Sequence]:
        """For a sequence whose account has no more pages to get."""
        others = [other for other in self.on_account(sequence.account) if other is not sequence]
        return [other for other in others if other.rank > sequence.rank or not _runs(other)]

    def _enough(self, victims: list[Sequence], num_lacking: int, headroom_pages: int = 0) -> list[Sequence]:
        """The first of them that together free so many pages, and their headroom with them."""
        num_owners = Counter[int]()
        for index, victim in enumerate(victims):
            num_owners.update(victim.page_table)
            num_lacking -= sum(self._pool.is_freed_by(page, num_owners[page]) for page in victim.page_table)
            num_lacking -= headroom_pages * _runs(victim)
            if num_lacking <= 0:
                return victims[: index + 1]
        return []

    def _holders(self) -> list[Sequence]:
        running = [s for s in self._queues.running() if s.key not in self._preempted]
        return running + self._waiting_with_pages()

    def _waiting_with_pages(self) -> list[Sequence]:
        return [
            s
            for s in self._queues.waiting
            if s.page_table and s.key not in self._admitted and s.key not in self._preempted
        ]


def _runs(sequence: Sequence) -> bool:
    return sequence.status is SequenceStatus.RUNNING
