"""The links that pages leave over: one to every decode worker that the router lists."""

from collections.abc import Callable, Collection
from functools import partial
from typing import TypeAlias

from baton.control import Address, Worker
from baton.kvtransfer.link import Link

# Link to that endpoint, without waiting; answers on the worker's thread, None if it cannot be had now.
Connect: TypeAlias = Callable[[Address, Callable[[Link | None], None]], None]


class KvLinks:
    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._links: dict[str, Link] = {}  # worker's id -> link
        self._asked: set[str] = set()

    def to(self, worker: str) -> Link | None:
        link = self._links.get(worker)
        return None if link is None or link.is_lost else link

    def keep_up(self, workers: Collection[Worker]) -> None:
        """Ask for what is missing; forget who is not there any more."""
        wanted = {worker.id: worker for worker in workers}
        self._links = {id_: link for id_, link in self._links.items() if id_ in wanted}
        for id_, worker in wanted.items():
            if self.to(id_) is None and id_ not in self._asked:
                self._asked.add(id_)
                self._connect(worker.kv_address, partial(self._answered, id_))

    def reachable(self) -> list[str]:
        return [id_ for id_ in self._links if self.to(id_) is not None]

    def _answered(self, worker: str, link: Link | None) -> None:
        self._asked.discard(worker)
        if link is not None:
            self._links[worker] = link
