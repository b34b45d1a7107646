"""What a router tells whatever shares its prefix index with others: Redis (redis_link.py), or nobody.

Nothing here waits or fails. The index and the books are changed first, then this is called.
"""

from typing import Protocol

from baton.control import PageEvents
from baton.router.redis_messages import AnyShared
from baton.worker import Worker


class Sharing(Protocol):
    def joined(self, worker: Worker) -> None:
        """A worker is connected here."""

    def left(self, worker_id: str) -> None:
        """It is not any more."""

    def pages(self, worker_id: str, events: PageEvents) -> None:
        """What a worker that is connected here has said."""

    def share(self, message: AnyShared) -> None:
        """A dispatch, a start or an end that other routers should count."""


class Alone:
    """A router without Redis: the replica is all there is."""

    def joined(self, worker: Worker) -> None: ...

    def left(self, worker_id: str) -> None: ...

    def pages(self, worker_id: str, events: PageEvents) -> None: ...

    def share(self, message: AnyShared) -> None: ...
