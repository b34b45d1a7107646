"""Who of those that wait may begin, and the pages that are promised to prefill workers meanwhile.

A promise is made before a prefill worker is asked, and ends when that worker has reserved the pages or will
not come for them. So a prompt that has been computed never waits for memory.
"""

from bisect import insort
from itertools import count
from typing import TypeAlias

from baton.decode_worker.attempt import Attempt
from baton.engine.replica import Replica

Turn: TypeAlias = tuple[int, int]  # (priority, serial): the lowest is next


class Admission:
    def __init__(self, engine: Replica) -> None:
        self._engine = engine
        self._waiting: list[tuple[Turn, Attempt]] = []
        self._serials = count()
        self._num_promised_pages = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, attempt: Attempt) -> None:
        insort(self._waiting, ((attempt.request.priority, next(self._serials)), attempt), key=_turn)

    def first(self) -> Attempt | None:
        return self._waiting[0][1] if self._waiting else None

    def leave(self, attempt: Attempt) -> None:
        """It waits no longer, for whatever reason."""
        self._waiting = [entry for entry in self._waiting if entry[1] is not attempt]

    def may_have_room(self, attempt: Attempt) -> bool:
        """Whether what it found no room for when it was last tried would fit now; True before that."""
        num_pages = attempt.num_wanted_pages
        return not num_pages or num_pages + self._num_promised_pages <= self._engine.num_available_pages

    def promise(self, attempt: Attempt, num_pages: int) -> bool:
        """Whether the pages will be there when the prefill worker asks for them."""
        attempt.num_wanted_pages = num_pages
        if not self.may_have_room(attempt):
            return False
        self._num_promised_pages += num_pages
        attempt.num_promised_pages = num_pages
        return True

    def end_promise(self, attempt: Attempt) -> None:
        self._num_promised_pages -= attempt.num_promised_pages
        attempt.num_promised_pages = 0


def _turn(entry: tuple[Turn, Attempt]) -> Turn:
    return entry[0]
