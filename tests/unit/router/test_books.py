from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.clock import ManualClock
from baton.control import Beat
from baton.request import Request, SamplingParams
from baton.router.books import (
    EXPECTED_OUTPUT_TOKENS,
    OTHERS,
    SILENCE_S,
    Books,
    Entry,
    Key,
    num_kv_tokens,
)
from baton.worker import Load
from tests.node_peers import a_request, a_worker, id_of

WORKERS = st.sampled_from(["p0", "p1", "d0", "d1"])
GATEWAYS = st.sampled_from("gh")
KEYS = st.tuples(st.sampled_from(["a", "b", "c", "d"]), st.integers(0, 1))


class BooksMachine(RuleBasedStateMachine):
    """Against a list of what is open, from which all sums are made anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books()
        self.open: dict[Key, Entry] = {}
        self.waiting: set[Key] = set()

    @rule(key=KEYS, gateway=GATEWAYS | st.just(OTHERS), decode=WORKERS, prefill=WORKERS | st.just(""))
    def enter(self, key: Key, gateway: str, decode: str, prefill: str) -> None:
        if key not in self.open:
            entry = Entry(gateway, decode, prefill, 10 + len(self.open), 100 + len(self.open))
            self.books.enter(key, entry)
            self.open[key] = entry
            self.waiting.add(key)

    @rule(key=KEYS)
    def start(self, key: Key) -> None:
        self.books.started(key)
        self.waiting.discard(key)

    @rule(key=KEYS)
    def end(self, key: Key) -> None:
        self.books.ended(key)
        self._forget(key)

    @rule(gateway=GATEWAYS)
    def leave(self, gateway: str) -> None:
        self.books.gateway_left(gateway)
        for key in [key for key, entry in self.open.items() if entry.gateway == gateway]:
            self._forget(key)

    @rule(worker=WORKERS)
    def forget_worker(self, worker: str) -> None:
        self.books.forget([worker])
        for key in [key for key, entry in self.open.items() if entry[:2] == (OTHERS, worker)]:
            self._forget(key)

    def _forget(self, key: Key) -> None:
        self.open.pop(key, None)
        self.waiting.discard(key)

    @invariant()
    def accounts_are_the_sums_of_what_is_open(self) -> None:
        self.books.check_integrity()
        assert len(self.books) == len(self.open)
        for worker in ("p0", "p1", "d0", "d1"):
            account = self.books.account(worker)
            filling = [self.open[key] for key in self.waiting if self.open[key].prefill == worker]
            assert [key for key, _ in self.books.waiting_at(worker)] == sorted(
                key for key in self.waiting if self.open[key].decode == worker
            )
            decoding = [entry for entry in self.open.values() if entry.decode == worker]
            begun = [key for key in self.open.keys() - self.waiting if self.open[key].decode == worker]
            assert account.num_decoding == len(begun)
            assert account.num_prompt_tokens == sum(entry.num_prompt_tokens for entry in filling)
            assert account.num_tokens == sum(entry.num_tokens for entry in decoding)
            assert account.num_attempts == len(filling) + len(decoding)


TestBooks: Any = BooksMachine.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("gateway", ["g", OTHERS])
@pytest.mark.parametrize("prefill", ["p0", ""])
@pytest.mark.parametrize("is_started", [False, True])
def test_decoding_are_those_that_have_their_first_token_and_no_end(
    gateway: str, prefill: str, is_started: bool
) -> None:
    books, key = Books(), (id_of("r"), 0)
    books.enter((id_of("another"), 0), Entry("h", "d0", prefill, 10, 10))
    books.enter(key, Entry(gateway, "d0", prefill, 10, 10))
    assert books.account("d0").num_decoding == 0
    if is_started:
        books.started(key)
        books.started(key)
        assert books.account("d0").num_decoding == 1
    books.check_integrity()
    books.ended(key)
    books.ended(key)
    books.started(key)
    assert books.account("d0").num_decoding == books.account("p0").num_decoding == 0
    books.check_integrity()


def test_what_a_gateway_or_another_router_had_decoded_is_not_when_that_is_gone() -> None:
    books = Books()
    for gateway in ("g", "h", OTHERS):
        for name in ("begun", "waiting"):
            books.enter((id_of(gateway + name), 0), Entry(gateway, "d0", "p0", 10, 10))
        books.started((id_of(f"{gateway}begun"), 0))
    assert books.account("d0").num_decoding == 3
    books.gateway_left("g")
    assert books.account("d0").num_decoding == 2
    books.check_integrity()
    books.forget(["d0"])  # the gateway that is left is still to say what has ended
    assert books.account("d0").num_decoding == 1
    books.check_integrity()


def test_share_is_of_what_is_scarcer() -> None:
    books, worker = Books(), a_worker("d0", num_pages=10, page_size=16, max_num_seqs=4)
    books.enter((id_of("a"), 0), Entry("g", worker.id, "", 10, 80))
    assert books.account(worker.id).share_of(worker) == 0.5
    books.enter((id_of("b"), 0), Entry("g", worker.id, "", 1, 1))
    books.enter((id_of("c"), 0), Entry("g", worker.id, "", 1, 1))
    assert books.account(worker.id).share_of(worker) == 0.75


def test_what_only_the_worker_knows_of_weighs_by_its_pages() -> None:
    books, worker = Books(), a_worker("d0", num_pages=100, page_size=16, max_num_seqs=1000)
    books.enter((id_of("a"), 0), Entry("g", worker.id, "", 10, 0))
    beat = Beat(load=Load(pages={"active": 20}), attempts=((id_of("a"), 0), (id_of("b"), 0)))
    books.beat(worker, beat)
    assert books.account(worker.id).share_of(worker) == 0.1
    books.beat(worker, Beat(load=Load(pages={"active": 20}), attempts=((id_of("a"), 0),)))
    assert books.account(worker.id).share_of(worker) == 0.001


def test_what_its_worker_does_not_name_for_long_has_ended() -> None:
    clock = ManualClock()
    books, worker = Books(clock), a_worker("d0")
    kept, lost = (id_of("a"), 0), (id_of("b"), 0)
    for key in (kept, lost):
        books.enter(key, Entry("g", worker.id, "", 10, 10))
    beat = Beat(load=Load(), attempts=(kept,))
    clock.advance(SILENCE_S)
    assert books.beat(worker, beat) == []
    clock.advance(0.1)
    assert books.beat(worker, beat) == [lost]
    books.ended(lost)
    assert books.beat(worker, beat) == []
    books.check_integrity()


def test_end_that_its_worker_shows_first_is_left_to_the_gateway_to_tell() -> None:
    """The gateway tells how many tokens there were as well: a Beat without the attempt may outrun it."""
    clock = ManualClock()
    books, worker, key = Books(clock), a_worker("d0"), (id_of("a"), 0)
    books.enter(key, Entry("g", worker.id, "", 10, 10))
    working, idle = Beat(load=Load(), attempts=(key,)), Beat(load=Load())
    for _ in range(3):
        clock.advance(SILENCE_S)
        assert books.beat(worker, working) == []
    clock.advance(1.0)
    assert books.beat(worker, idle) == []
    clock.advance(SILENCE_S)
    assert books.beat(worker, idle) == [key]


def test_expected_tokens_are_bounded_by_what_was_asked_for() -> None:
    def expected(request: Request) -> int:
        return num_kv_tokens(request)

    few, many, any_number = (
        a_request(num_tokens=40, sampling=SamplingParams(max_tokens=limit)) for limit in (8, 10_000, None)
    )
    assert expected(few) == 48
    assert expected(many) == expected(any_number) == 40 + EXPECTED_OUTPUT_TOKENS
    begun = a_request(num_tokens=40, generated_token_ids=(1, 2, 3), attempt=1)
    assert expected(begun) == 48
