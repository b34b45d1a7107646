"""Questions to the router of how it has routed requests: each has one answer, in the order of asking."""

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from baton.control import Explain
from baton.decision import Decision
from baton.node import Peer

MAX_ASKED: Final = 64  # at once

# Called once: with a decision for each attempt, or None when there is no router to ask.
Told: TypeAlias = Callable[[tuple[Decision, ...] | None], None]


class Explanations:
    def __init__(self, router: Callable[[], Peer | None]) -> None:
        self._router = router
        self._asked: deque[Told] = deque()

    def ask(self, request_id: str, told: Told) -> None:
        router = self._router()
        if router is None or len(self._asked) >= MAX_ASKED:
            told(None)
            return
        self._asked.append(told)
        router.send(Explain(request_id=request_id))

    def answer(self, decisions: tuple[Decision, ...]) -> None:
        if self._asked:
            self._asked.popleft()(decisions)

    def lose_router(self) -> None:
        asked, self._asked = self._asked, deque()
        for told in asked:
            told(None)
