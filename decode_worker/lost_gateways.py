"""Gateways that attempts name and that are not there. A Dispatch may come a moment before its gateway."""

from collections.abc import Collection, Iterable

from baton.colleagues import Colleagues


class LostGateways:
    def __init__(self, colleagues: Colleagues) -> None:
        self._colleagues = colleagues
        self._missing: set[str] = set()  # at the last tick

    def tick(self, named: Iterable[str]) -> Collection[str]:
        """Of those that attempts name now, the ones that were missing at the last tick, and still are."""
        missing = {id_ for id_ in named if self._colleagues.peer(id_) is None}
        lost = missing & self._missing
        self._missing = missing
        return lost
