"""The links that pages leave over: one to every worker that the router lists and that could take them."""

from collections.abc import Callable, Collection
from functools import partial
from typing import TypeAlias

from baton.kvtransfer.link import Link
from baton.worker import Address, Worker

# Link to that endpoint, without waiting; answers on the worker's thread, None if it cannot be had now.
Connect: TypeAlias = Callable[[Address, Callable[[Link | None], None]], None]


class KvLinks:
    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._links: dict[str, Link] = {}  # worker's id -> link
        self._asked: set[str] = set()
        self._wanted: frozenset[str] = frozenset()

    def to(self, worker: str) -> Link | None:
        link = self._links.get(worker) if worker in self._wanted else None
        return None if link is None or link.is_lost else link

    def keep_up(self, workers: Collection[Worker]) -> None:
        """Ask for what is missing. A link to who is not listed any more is kept, unused, while it lives: who
        is listed again, as after a moment's silence, is not linked to twice.
        """
        self._wanted = frozenset(worker.id for worker in workers)
        self._links = {id_: link for id_, link in self._links.items() if not link.is_lost}
        for worker in workers:
            if self.to(worker.id) is None and worker.id not in self._asked:
                self._asked.add(worker.id)
                self._connect(worker.kv_address, partial(self._answered, worker.id))

    def reachable(self) -> list[str]:
        return [id_ for id_ in self._links if self.to(id_) is not None]

    def _answered(self, worker: str, link: Link | None) -> None:
        self._asked.discard(worker)
        if link is not None:
            self._links[worker] = link
