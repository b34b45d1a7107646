"""How work is spread over workers, of late: most of it may go to few of them."""

from baton.router.fading import Fading


class Spread:
    def __init__(self, memory_s: float, now_s: float) -> None:
        """memory_s: see Fading."""
        self._memory_s = memory_s
        self._given: dict[str, Fading] = {}
        self._sum = Fading(memory_s, now_s)
        self._squares = Fading(memory_s / 2, now_s)  # of what each was given: they fade twice as fast

    def add(self, worker_id: str, amount: float, now_s: float) -> None:
        given = self._given.get(worker_id)
        if given is None:
            given = self._given[worker_id] = Fading(self._memory_s, now_s)
        self._squares.add((2 * given.at(now_s) + amount) * amount, now_s)
        given.add(amount, now_s)
        self._sum.add(amount, now_s)

    def mean(self, now_s: float) -> float:
        """What a worker was given: the mean over all that was given, not over workers. A worker that was
        given little counts little, and one that was given nothing does not count.
        """
        total = self._sum.at(now_s)
        return self._squares.at(now_s) / total if total > 0.0 else 0.0

    def forget(self, worker_id: str, now_s: float) -> None:
        """It is gone."""
        if self._given.pop(worker_id, None) is None:
            return
        left = [each.at(now_s) for each in self._given.values()]  # taken off, it would leave rounding errors
        self._sum, self._squares = Fading(self._memory_s, now_s), Fading(self._memory_s / 2, now_s)
        self._sum.add(sum(left), now_s)
        self._squares.add(sum(each * each for each in left), now_s)
