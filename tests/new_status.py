"""The status of a cluster after a moment that the test chooses."""

from collections.abc import Callable

from baton.gateway.streams.frontend import Frontend
from baton.messages.operations import Status


def new_status(frontend: Frontend) -> Callable[[], Status | None]:
    """Return a function that returns the status once every router has told its own anew, and None before.

    While there is no status at the call, the first complete one counts as old.
    """
    old = frontend.status

    def status() -> Status | None:
        nonlocal old
        new = frontend.status
        if old is None or new is None:
            old = new
            return None
        is_old = any(now is before for now in new.routers for before in old.routers)
        return None if is_old else new

    return status
