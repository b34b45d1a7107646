"""Links are asked for once, answered later, and forgotten with their workers."""

from collections.abc import Callable

import msgspec

from baton.kvtransfer.links import KvLinks, Link
from baton.messages.workers import Address, Worker, WorkerRole

Answer = Callable[[Link | None], None]


class Asked:
    """A Connect that answers when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Address, Answer]] = []

    def __call__(self, address: Address, answer: Answer) -> None:
        self.waiting.append((address, answer))

    def answer(self, link: Link | None) -> None:
        _, answer = self.waiting.pop(0)
        answer(link)


class StubLink(Link):
    """A live link without a connection."""

    def __init__(self) -> None:
        self.is_lost = False


def a_worker(number: int) -> Worker:
    return Worker(
        id=f"{number:032x}",
        name=f"decode-{number}",
        role=WorkerRole.DECODE,
        model="tiny",
        fingerprint="model",
        address=Address("127.0.0.1", 9),
        kv_address=Address("127.0.0.1", 10 + number),
        page_size=16,
        num_pages=64,
        max_num_seqs=8,
        max_model_len=96,
    )


def test_a_link_is_asked_for_once() -> None:
    asked, worker = Asked(), a_worker(1)
    links = KvLinks(asked)
    links.keep_up([worker])
    links.keep_up([worker])
    assert [address for address, _ in asked.waiting] == [worker.kv_address]
    assert links.to(worker.id) is None and links.reachable() == []
    asked.answer(StubLink())
    links.keep_up([worker])
    assert links.to(worker.id) is not None and links.reachable() == [worker.id]
    assert not asked.waiting


def test_a_failed_try_is_made_again() -> None:
    asked, worker = Asked(), a_worker(1)
    links = KvLinks(asked)
    links.keep_up([worker])
    asked.answer(None)
    assert links.to(worker.id) is None
    links.keep_up([worker])
    assert len(asked.waiting) == 1


def test_a_lost_link_is_replaced() -> None:
    asked, worker = Asked(), a_worker(1)
    links = KvLinks(asked)
    links.keep_up([worker])
    link = StubLink()
    asked.answer(link)
    link.is_lost = True
    assert links.to(worker.id) is None and links.reachable() == []
    links.keep_up([worker])
    assert len(asked.waiting) == 1


def test_unlisted_worker_is_unreachable() -> None:
    asked, worker = Asked(), a_worker(1)
    links = KvLinks(asked)
    links.keep_up([worker])
    asked.answer(StubLink())
    links.keep_up([a_worker(2)])
    assert links.to(worker.id) is None and links.reachable() == []


def test_worker_that_returns_to_the_list_keeps_its_link() -> None:
    asked, worker = Asked(), a_worker(1)
    links = KvLinks(asked)
    links.keep_up([worker])
    link = StubLink()
    asked.answer(link)
    links.keep_up([])
    assert links.to(worker.id) is None and links.reachable() == []
    links.keep_up([worker])
    assert links.to(worker.id) is link and not asked.waiting


def test_process_that_returns_under_another_id_keeps_its_link() -> None:
    asked, worker = Asked(), a_worker(1)
    links = KvLinks(asked)
    links.keep_up([worker])
    asked.answer(StubLink())
    flipped = msgspec.structs.replace(worker, id=f"{7:032x}", role=WorkerRole.PREFILL)
    links.keep_up([flipped])
    assert links.reachable() == [flipped.id] and not asked.waiting
