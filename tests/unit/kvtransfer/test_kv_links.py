"""Links are asked for once, answered later, and forgotten with their workers."""

from collections.abc import Callable
from itertools import pairwise
from typing import Final

import msgspec
import pytest

from baton.kvtransfer.links import MOST_CALLS, KvLinks, Link
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


WORKER: Final = a_worker(1)


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def links(asked: Asked) -> KvLinks:
    """Links that have been asked to reach WORKER, without an answer yet."""
    made = KvLinks(asked)
    made.keep_up([WORKER])
    return made


def reaches_nothing(links: KvLinks) -> bool:
    return links.to(WORKER.id) is None and links.reachable() == []


def test_lost_link_is_asked_for_again(asked: Asked, links: KvLinks) -> None:
    link = StubLink()
    asked.answer(link)
    link.is_lost = True
    assert reaches_nothing(links)
    links.keep_up([WORKER])
    assert len(asked.waiting) == 1


def test_link_that_fails_is_asked_for_less_and_less_often(asked: Asked, links: KvLinks) -> None:
    times = []
    asked.answer(None)
    for number in range(200):
        links.keep_up([WORKER])
        if asked.waiting:
            times.append(number)
            asked.answer(None)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps == sorted(gaps) and gaps[0] <= 4 and gaps[-1] == MOST_CALLS
    while not asked.waiting:
        links.keep_up([WORKER])
    link = StubLink()
    asked.answer(link)
    link.is_lost = True
    links.keep_up([WORKER])
    assert len(asked.waiting) == 1, "one that was open is asked for at once"


def test_unlisted_worker_is_unreachable_and_keeps_its_link(asked: Asked, links: KvLinks) -> None:
    link = StubLink()
    asked.answer(link)
    links.keep_up([a_worker(2)])
    assert reaches_nothing(links)
    asked.answer(None)
    links.keep_up([WORKER])
    assert links.to(WORKER.id) is link and not asked.waiting


def test_process_that_returns_under_another_id_keeps_its_link(asked: Asked, links: KvLinks) -> None:
    asked.answer(StubLink())
    flipped = msgspec.structs.replace(WORKER, id=f"{7:032x}", role=WorkerRole.PREFILL)
    links.keep_up([flipped])
    assert links.reachable() == [flipped.id] and not asked.waiting
