from hypothesis import given
from hypothesis import strategies as st

from baton.request import Request
from baton.router.in_flight import EXPECTED_OUTPUT_TOKENS
from baton.router.queue.quotas import MAX_TENANTS, RequestWork, WorkCharge, WorkLedger
from tests.node_peers import id_of
from tests.unit.router.queue_cases import asked


class Sums:
    """What each tenant has been charged, with all that was made good."""

    def __init__(self) -> None:
        self.ledger = WorkLedger(self._correct)
        self.work: dict[str, float] = {}

    def _correct(self, charge: WorkCharge, work: float) -> None:
        self.work[charge.tenant] += work

    def let_out(self, request: Request, *, is_begun: bool = False) -> None:
        work = self.ledger.expect(request, is_begun=is_begun)
        key = (request.request_id, request.attempt)
        self.work[request.tenant] = self.work.get(request.tenant, 0.0) + work.total
        self.ledger.charge(key, WorkCharge(0, request.tenant, work, request.num_tokens, is_begun))


def a_request(name: str = "r", tenant: str = "a", num_tokens: int = 100, max_tokens: int = 1000) -> Request:
    return asked(name, tenant, num_tokens=num_tokens, max_tokens=max_tokens).request


def test_answer_is_expected_to_be_as_those_of_the_tenant_were() -> None:
    sums = Sums()
    assert sums.ledger.expect(a_request()) == RequestWork(100.0, float(EXPECTED_OUTPUT_TOKENS))
    for number in range(40):
        sums.let_out(a_request(str(number)))
        sums.ledger.ended((id_of(str(number)), 0), 10)
    assert sums.ledger.expect(a_request()).answer == 10.0
    assert sums.ledger.expect(a_request(max_tokens=4)).answer == 4.0
    assert sums.ledger.expect(a_request(tenant="b")).answer == EXPECTED_OUTPUT_TOKENS


def test_prompt_is_expected_to_be_there_as_far_as_the_tenants_were() -> None:
    sums = Sums()
    for number in range(40):
        sums.let_out(a_request(str(number)))
        sums.ledger.computed((id_of(str(number)), 0), 25)
    assert sums.ledger.expect(a_request(num_tokens=1000)).prompt == 250.0


def test_what_workers_have_begun_with_has_its_prompt_for_nothing() -> None:
    again = asked("r", attempt=1).request
    sums = Sums()
    assert sums.ledger.expect(again, is_begun=True).prompt == 0.0
    sums.let_out(again, is_begun=True)
    sums.ledger.computed((again.request_id, 1), 100)
    assert sums.work["a"] == 10.0


def test_what_nobody_knows_stays_as_it_was_expected() -> None:
    sums = Sums()
    sums.let_out(a_request())
    sums.ledger.ended((id_of("r"), 0), None)
    assert sums.work["a"] == 100 + EXPECTED_OUTPUT_TOKENS and len(sums.ledger) == 0


@given(
    used=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 500), st.integers(0, 900), st.integers(0, 2)),
        max_size=30,
    )
)
def test_accounts_are_exact_in_the_end(used: list[tuple[str, int, int, int]]) -> None:
    """Whether the prompt's time was told before the end, after it, or twice."""
    sums = Sums()
    truth = {"a": 0.0, "b": 0.0}
    for number, (tenant, num_new, num_answered, told) in enumerate(used):
        key = (id_of(str(number)), 0)
        sums.let_out(a_request(str(number), tenant, num_tokens=500))
        work = sums.ledger.get(key)
        assert work is not None
        for _ in range(told):
            sums.ledger.computed(key, num_new)
        sums.ledger.ended(key, num_answered)
        sums.ledger.computed(key, num_new)
        sums.ledger.ended(key, 7)
        truth[tenant] += num_answered + (num_new if told else work.work.prompt)
    for tenant, work_done in sums.work.items():
        assert abs(work_done - truth[tenant]) < 1e-6


def test_habits_are_bounded() -> None:
    sums = Sums()
    for number in range(MAX_TENANTS + 10):
        sums.ledger.expect(a_request(tenant=str(number)))
    assert len(sums.ledger._habits) == MAX_TENANTS
