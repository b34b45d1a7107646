"""Questions to the routers of how they have routed requests.

All of them are asked, as each knows its own attempts alone; each answers in the order in which it was asked.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from baton.decision import Decision
from baton.node import Peer
from baton.operating import Explain

MAX_ASKED: Final = 64  # at once

# Called once: with a decision for each attempt, or None when there is no router to answer.
Told: TypeAlias = Callable[[tuple[Decision, ...] | None], None]


class Question:
    def __init__(self, told: Told, num_asked: int) -> None:
        self._told = told
        self._num_waiting = num_asked
        self._found: list[Decision] | None = None  # None: nobody has answered

    def answered(self, decisions: Sequence[Decision] | None) -> None:
        """By one of those that were asked; None: it is gone."""
        self._num_waiting -= 1
        if decisions is not None:
            self._found = [*(self._found or ()), *decisions]
        if not self._num_waiting:
            found = self._found
            self._told(None if found is None else tuple(sorted(found, key=lambda each: each.attempt)))


class Explanations:
    def __init__(self, routers: Callable[[], Sequence[Peer]]) -> None:
        """routers: those that are connected, whenever it is asked."""
        self._routers = routers
        self._asked: dict[str, deque[Question]] = {}  # by the router's id, oldest first

    def ask(self, request_id: str, told: Told) -> None:
        routers = self._routers()
        if not routers or any(len(waiting) >= MAX_ASKED for waiting in self._asked.values()):
            told(None)
            return
        question = Question(told, len(routers))
        for router in routers:
            self._asked.setdefault(router.hello.id, deque()).append(question)
        for router in routers:
            router.send(Explain(request_id=request_id))

    def answer(self, router: Peer, decisions: tuple[Decision, ...]) -> None:
        waiting = self._asked.get(router.hello.id)
        if waiting:
            waiting.popleft().answered(decisions)

    def lose(self, router: Peer) -> None:
        """It will answer nothing any more."""
        for question in self._asked.pop(router.hello.id, ()):
            question.answered(None)
