"""Cancels that came before the Dispatch that they are about: the two travel by different ways."""

from collections import OrderedDict
from typing import Final

from baton.control import Cancel
from baton.request import Request

MAX_REMEMBERED: Final = 4096  # most are about attempts that have ended, and no Dispatch will come


class EarlyCancels:
    def __init__(self) -> None:
        self._attempts: OrderedDict[tuple[str, int], None] = OrderedDict()  # oldest first

    def add(self, cancel: Cancel) -> None:
        self._attempts[cancel.request_id, cancel.attempt] = None
        if len(self._attempts) > MAX_REMEMBERED:
            self._attempts.popitem(last=False)

    def has(self, request: Request) -> bool:
        return (request.request_id, request.attempt) in self._attempts
