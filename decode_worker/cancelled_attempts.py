"""Attempts that have been cancelled: their Dispatch may come later, since it travels by another way."""

from collections import OrderedDict
from typing import Final

from baton.control import Cancel
from baton.request import Request

MAX_REMEMBERED: Final = 4096  # requests; for most of them no Dispatch will come


class CancelledAttempts:
    """A cancel is of earlier attempts of the request, too: a router that stood still may send one late."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()  # request id -> attempt, oldest cancel first

    def add(self, cancel: Cancel) -> None:
        self._last[cancel.request_id] = max(cancel.attempt, self._last.pop(cancel.request_id, 0))
        if len(self._last) > MAX_REMEMBERED:
            self._last.popitem(last=False)

    def __contains__(self, request: Request) -> bool:
        return request.attempt <= self._last.get(request.request_id, -1)
