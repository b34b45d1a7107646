"""When a prefix is fetched and when not, and what is let go of. Workers' tests have real pages for it."""

from collections.abc import Iterator, Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.kvtransfer.endpoint import PageEndpoint
from baton.kvtransfer.links import KvLinks, Link
from baton.kvtransfer.prefixes import (
    FIRST_BYTES_PER_S,
    LEAST_DEADLINE_S,
    MAX_PULLS,
    MOST_DEADLINE_S,
    PATIENCE,
    PulledPrefixes,
    plan_pull,
)
from baton.kvtransfer.protocol.handoff import HandoffOutcome, Owner, TransferEnded
from baton.messages.bounds import MAX_PULLED_PAGES
from baton.messages.control import PullSource
from baton.request import FilledPages
from tests.endpoint_host import EndpointHost
from tests.node_peers import a_worker
from tests.numbered_pages import key_of

HOLDER = "5" * 32
SOURCE = PullSource(HOLDER, 64)


class Endpoint:
    """The part of a PageEndpoint that pulls use."""

    def __init__(self) -> None:
        self.asked: list[Sequence[bytes]] = []
        self.aborted: list[bytes] = []

    def pull(
        self, link: Link, wanted: Sequence[bytes], num_units: int, adopter: Owner, *, deadline_s: float
    ) -> bytes:
        if len(wanted) > 3:
            raise ValueError("more than a message holds")
        self.asked.append(wanted)
        return len(self.asked).to_bytes(16, "big")

    def abort(self, transfer: bytes, reason: str) -> None:
        self.aborted.append(transfer)


class Store:
    """Of an engine: `pages` is itself, as far as the size of pages goes."""

    page_size = 16

    def __init__(self) -> None:
        self.has_room = True
        self.released: list[FilledPages] = []

    @property
    def pages(self) -> "Store":
        return self

    def make_room(self, num_pages: int) -> bool:
        return self.has_room

    def release(self, filled: FilledPages) -> None:
        self.released.append(filled)


class Prefix:
    def __init__(self, owner: str = "a", num_tokens: int = 63, num_known: int = 1) -> None:
        self.owner = owner
        self.num_tokens = num_tokens
        self.claimed = FilledPages(tuple(range(num_known)), 16 * num_known, owner)

    def claim(self, multiple_of: int) -> FilledPages:
        return self.claimed

    def keys(self, page_size: int) -> list[bytes]:
        return [key_of(page) for page in (11, 12, 13, 14)]


class Bench:
    def __init__(self, link: Link) -> None:
        self.endpoint, self.store = Endpoint(), Store()
        links = KvLinks(lambda address, answer: answer(link))
        links.keep_up([a_worker("holder", id=HOLDER)])
        self.clock = ManualClock()
        self.prefixes = PulledPrefixes[str](self.store, cast(PageEndpoint, self.endpoint), links, self.clock)


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    ours, theirs = EndpointHost(), EndpointHost()
    yield ours.endpoint.link(theirs.address())
    ours.close()
    theirs.close()


@pytest.fixture
def bench(link: Link) -> Bench:
    return Bench(link)


def transfer(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_pull_requests_the_pages_after_the_cached_prefix_by_local_keys(bench: Bench) -> None:
    prefix = Prefix()
    assert bench.prefixes.begin("a", SOURCE, prefix)
    assert bench.endpoint.asked == [(key_of(12), key_of(13))]
    pulled = bench.prefixes.take(TransferEnded(transfer(1), HandoffOutcome.ADOPTED, "", (8, 9), None))
    assert pulled is not None
    assert (pulled.waiter, pulled.filled) == ("a", FilledPages((0, 8, 9), 48, "a"))
    assert bench.prefixes.counters["pulls"] == 1 and not bench.store.released


def test_a_pull_that_fails_leaves_nothing(bench: Bench) -> None:
    prefix = Prefix()
    bench.prefixes.begin("a", SOURCE, prefix)
    pulled = bench.prefixes.take(TransferEnded(transfer(1), HandoffOutcome.RECOMPUTE, "refused", (), None))
    assert pulled is not None and pulled.filled is None
    assert bench.store.released == [prefix.claimed]
    assert bench.prefixes.counters["pulls_failed"] == 1


def test_pages_of_a_dropped_pull_are_released(bench: Bench) -> None:
    prefix = Prefix()
    bench.prefixes.begin("a", SOURCE, prefix)
    bench.prefixes.drop("a")
    bench.prefixes.drop("a")
    bench.prefixes.drop("somebody else")
    assert bench.endpoint.aborted == [transfer(1)]
    assert bench.prefixes.take(TransferEnded(transfer(1), HandoffOutcome.ADOPTED, "", (8, 9), None)) is None
    assert bench.store.released == [prefix.claimed, FilledPages((8, 9), 32, "a")]


@pytest.mark.parametrize("case", ["no room", "all is known", "too much", "another holder", "none is wanted"])
def test_impossible_pull_is_not_begun_and_holds_nothing(bench: Bench, case: str) -> None:
    prefix, source = Prefix(), SOURCE
    bench.store.has_room = case != "no room"
    if case == "all is known":
        prefix = Prefix(num_known=4)
    elif case == "too much":
        prefix = Prefix(num_known=0, num_tokens=64)
    elif case == "another holder":
        source = PullSource("6" * 32, 64)
    elif case == "none is wanted":
        prefix = Prefix(num_tokens=0)
    assert not bench.prefixes.begin("a", source, prefix)
    assert not bench.endpoint.asked and bench.prefixes.counters["pulls_not_begun"] == 1
    was_claimed = case in ("no room", "all is known", "too much")
    assert bench.store.released == [prefix.claimed] * was_claimed


def test_request_without_a_source_counts_no_pull(bench: Bench) -> None:
    assert not bench.prefixes.begin("a", None, Prefix())
    assert not bench.prefixes.counters


def test_number_of_concurrent_pulls_is_bounded(bench: Bench) -> None:
    names = [f"{number}" for number in range(MAX_PULLS + 1)]
    assert [bench.prefixes.begin(name, SOURCE, Prefix(name)) for name in names] == [True] * MAX_PULLS + [
        False
    ]


SIZES = st.sampled_from([4, 8, 16, 64])


@given(ours=SIZES, theirs=SIZES, held=st.integers(0, 12), first=st.integers(0, 5), stop=st.integers(0, 400))
def test_a_plan_has_every_token_that_can_be_had(
    ours: int, theirs: int, held: int, first: int, stop: int
) -> None:
    first *= max(ours, theirs)
    keys = list(map(key_of, range(held)))
    plan = plan_pull(keys, (ours, theirs), first, stop)
    unit = min(ours, theirs)
    units = [at for at in range(first, stop, unit) if at + unit <= stop and at // theirs < held]
    if not units:
        assert plan is None
        return
    assert plan is not None
    assert (plan.num_units, plan.num_tokens) == (len(units), len(units) * unit)
    assert plan.num_pages == len({at // ours for at in units})
    assert plan.wanted == tuple(keys[index] for index in sorted({at // theirs for at in units}))


@pytest.mark.parametrize(("ours", "theirs"), [(16, 16), (8, 16), (16, 8)])
def test_a_plan_has_as_many_pages_as_one_pull_may_have(ours: int, theirs: int) -> None:
    held = [b""] * (2 * MAX_PULLED_PAGES)
    plan = plan_pull(held, (ours, theirs), 32, len(held) * theirs)
    assert plan is not None
    assert max(len(plan.wanted), plan.num_pages) == plan.num_units == MAX_PULLED_PAGES


def test_deadline_grows_with_the_bytes_between_two_bounds(bench: Bench) -> None:
    deadline_s = bench.prefixes.deadline_s
    assert deadline_s(1) == LEAST_DEADLINE_S
    assert deadline_s(int(4 * FIRST_BYTES_PER_S)) == 4 * PATIENCE
    assert deadline_s(int(1e15)) == MOST_DEADLINE_S


def test_slow_pulls_extend_the_deadline_of_the_next(bench: Bench) -> None:
    def pull(number: int, seconds: float, outcome: HandoffOutcome) -> float:
        """The deadline of a large pull, after a pull of so many seconds."""
        assert bench.prefixes.begin("a", SOURCE, Prefix())
        bench.clock.advance(seconds)
        bench.prefixes.take(TransferEnded(transfer(number), outcome, "", (8, 9), None))
        return bench.prefixes.deadline_s(int(FIRST_BYTES_PER_S))

    fast_s = bench.prefixes.deadline_s(int(FIRST_BYTES_PER_S))
    slow_s = pull(1, 0.1, HandoffOutcome.ADOPTED)
    slower_s = pull(2, LEAST_DEADLINE_S, HandoffOutcome.RECOMPUTE)
    assert fast_s < slow_s < slower_s
    assert pull(3, 0.001, HandoffOutcome.RECOMPUTE) == slower_s  # a refusal says nothing about bandwidth
