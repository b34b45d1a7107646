"""Which pages are asked for, against a slow oracle; and how long they are waited for."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.kvtransfer.links import Link
from baton.kvtransfer.prefixes import (
    FIRST_BYTES_PER_S,
    LEAST_DEADLINE_S,
    MOST_DEADLINE_S,
    PATIENCE,
    PlannedPull,
    PrefixPulls,
    plan_pull,
)
from baton.kvtransfer.protocol.handoff import HandoffOutcome, Owner, TransferEnded
from baton.kvtransfer.protocol.pull import WantedPage
from tests.endpoint_host import Host
from tests.numbered_pages import wanted_pages

SIZES = st.sampled_from([4, 8, 16, 64])


@given(ours=SIZES, theirs=SIZES, held=st.integers(0, 12), first=st.integers(0, 5), stop=st.integers(0, 400))
def test_a_plan_has_every_token_that_can_be_had(
    ours: int, theirs: int, held: int, first: int, stop: int
) -> None:
    first *= max(ours, theirs)
    pages = wanted_pages((100 + index, index) for index in range(held))
    plan = plan_pull(pages, (ours, theirs), first, stop)
    unit = min(ours, theirs)
    units = [at for at in range(first, stop, unit) if at + unit <= stop and at // theirs < held]
    if not units:
        assert plan is None
        return
    assert plan is not None
    assert (plan.num_units, plan.num_tokens) == (len(units), len(units) * unit)
    assert plan.num_pages == len({at // ours for at in units})
    assert plan.wanted == tuple(pages[index] for index in sorted({at // theirs for at in units}))


class Endpoint:
    """Remembers what it is asked for, and has nothing."""

    def __init__(self) -> None:
        self.deadlines_s: list[float] = []

    def pull(
        self,
        link: Link,
        wanted: Sequence[WantedPage],
        num_units: int,
        adopter: Owner,
        *,
        deadline_s: float,
    ) -> bytes:
        self.deadlines_s.append(deadline_s)
        return len(self.deadlines_s).to_bytes(16, "big")


def ended(transfer: bytes, outcome: HandoffOutcome) -> TransferEnded:
    return TransferEnded(transfer, outcome, "", (1,), None)


def test_what_is_waited_for_grows_with_the_bytes_between_two_bounds() -> None:
    pulls = PrefixPulls(Endpoint(), ManualClock())
    assert pulls.deadline_s(1) == LEAST_DEADLINE_S
    assert pulls.deadline_s(int(4 * FIRST_BYTES_PER_S)) == 4 * PATIENCE
    assert pulls.deadline_s(int(1e15)) == MOST_DEADLINE_S


def test_what_pulls_took_is_expected_of_the_next() -> None:
    clock, endpoint = ManualClock(), Endpoint()
    pulls = PrefixPulls(endpoint, clock)
    host, other = Host(), Host()
    try:
        link = host.endpoint.link(other.address())
        plan = PlannedPull(tuple(wanted_pages([(1, 1)])), 1, 1, 16)
        num_bytes = 16 * link.hello.layout.token_bytes * link.hello.layout.tp_size
        large = int(100 * FIRST_BYTES_PER_S)
        before_s = pulls.deadline_s(large // 100)
        transfer = pulls.begin(link, plan, "me")
        assert endpoint.deadlines_s == [LEAST_DEADLINE_S]
        clock.advance(num_bytes / (FIRST_BYTES_PER_S / 10))
        pull = pulls.take(ended(transfer, HandoffOutcome.ADOPTED))
        assert pull is not None and pull.pages == (1,) and pull.num_bytes == num_bytes
        slower_s = pulls.deadline_s(large // 100)
        assert slower_s > before_s
        transfer = pulls.begin(link, plan, "me")
        clock.advance(LEAST_DEADLINE_S)
        pull = pulls.take(ended(transfer, HandoffOutcome.RECOMPUTE))
        assert pull is not None and pull.pages is None
        assert pulls.deadline_s(large // 100) > slower_s
        transfer = pulls.begin(link, plan, "me")
        clock.advance(0.001)
        refused_s = pulls.deadline_s(large // 100)
        pulls.take(ended(transfer, HandoffOutcome.RECOMPUTE))
        assert pulls.deadline_s(large // 100) == refused_s  # it says nothing of how fast bytes move
    finally:
        host.close()
        other.close()


def test_other_transfers_are_none_of_its_business() -> None:
    assert PrefixPulls(Endpoint(), ManualClock()).take(ended(b"x" * 16, HandoffOutcome.ADOPTED)) is None
