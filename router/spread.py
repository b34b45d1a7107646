"""How what is computed is spread over workers, of late."""

from typing import Final

from baton.router.fading import Fading

BALANCE_S: Final = 300.0  # over which workers that cost the same are to be given the same


class Spread:
    """Of prompts' tokens, by worker."""

    def __init__(self, now_s: float) -> None:
        self._tokens: dict[str, Fading] = {}
        self._sum = Fading(BALANCE_S, now_s)
        self._squares = Fading(BALANCE_S / 2, now_s)  # of what each was given, which fade as fast as it does

    def add(self, worker_id: str, num_tokens: float, now_s: float) -> None:
        if worker_id not in self._tokens:
            self._tokens[worker_id] = Fading(BALANCE_S, now_s)
        before = self._tokens[worker_id].at(now_s)
        self._squares.add((2 * before + num_tokens) * num_tokens, now_s)
        self._tokens[worker_id].add(num_tokens, now_s)
        self._sum.add(num_tokens, now_s)

    def of(self, worker_id: str, now_s: float) -> float:
        """What it was given."""
        tokens = self._tokens.get(worker_id)
        return 0.0 if tokens is None else tokens.at(now_s)

    def num(self, now_s: float) -> float:
        """Over how many workers: as many as there would be if each of them had as much as the worker that a
        token went to had on average. 1 at least, and no more than there are.
        """
        squares = self._squares.at(now_s)
        if squares <= 0.0:
            return 1.0
        return min(max(1.0, self._sum.at(now_s) ** 2 / squares), max(1.0, len(self._tokens)))

    def forget(self, worker_id: str, now_s: float) -> None:
        """It is gone."""
        had = self.of(worker_id, now_s)
        if self._tokens.pop(worker_id, None) is not None:
            self._sum.add(-had, now_s)
            self._squares.add(-had * had, now_s)
