"""Shares, token buckets and counts of tenants stay exact in any order of events."""

from collections import defaultdict
from typing import Any, Final, NamedTuple

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.fair_queue import CREDIT_AGES
from baton.messages.control import Ended, Measured, Rejected, Routed, Started, Submit
from baton.messages.workers import PrefillTimes
from baton.request import AttemptKey
from baton.router.in_flight import SchedulingClass
from baton.router.queue.quotas import RequestWork, WorkEstimator
from baton.router.queue.tenant_queues import QueuedAttempt
from baton.tenants import Quotas, Refusal, Sla
from tests.node_peers import TestPeer
from tests.unit.router.queue_cases import LONG, a_cluster, answers, asked, fill, start, submit

BURST: Final = 10**9
WEIGHTS: Final = {"a": 1.0, "b": 4.0}
MAX_ACTIVE: Final = 6
BUCKET: Final = Quotas(tokens_per_s=1e-9, burst_tokens=BURST, max_active_sequences=MAX_ACTIVE)
QUOTAS: Final = msgspec.structs.replace(BUCKET, max_concurrent_requests=9)


class OpenAttempt(NamedTuple):
    """An attempt that has not ended, and its charge."""

    submit: Submit
    gateway: str
    prompt: float  # tokens
    answer: float
    is_computed: bool = False

    @property
    def tenant(self) -> str:
        return self.submit.request.tenant

    @property
    def charge(self) -> float:
        return self.prompt + self.answer


class Accounts(RuleBasedStateMachine):
    """Time stands still, so no debt is forgiven: each tenant's sums must be those of its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.c = next(a_cluster())
        self.open: dict[AttemptKey, OpenAttempt] = {}
        self.used: defaultdict[str, float] = defaultdict(float)  # by attempts that have ended
        self.estimator = WorkEstimator()  # a twin of the queue's
        self.num_asked = 0
        self._connect_second_gateway()
        for tenant, gateway in ("ag", "ah", "ag", "bh"):
            self.ask(tenant, gateway, LONG, 50, Sla())

    def _connect_second_gateway(self) -> None:
        self.c.peers["h"] = TestPeer.gateway(self.c.router, "h")
        self.c.all_reach_all()

    def is_active(self, key: AttemptKey) -> bool:
        return key in self.open and key not in self.c.router.admission_queue

    def draw(self, data: Any, *, active: bool = False) -> AttemptKey:
        key: AttemptKey = data.draw(
            st.sampled_from([key for key in self.open if not active or self.is_active(key)])
        )
        return key

    def say(self, gateway: str, asked_for: Submit) -> None:
        key = (asked_for.request.request_id, asked_for.request.attempt)
        work = self.estimator.expect(asked_for.request, is_begun=asked_for.is_begun)
        self.c[gateway].say(asked_for)
        rejected = [each.request_id for each in answers(self.c, gateway) if isinstance(each, Rejected)]
        if key[0] not in rejected:
            self.open[key] = OpenAttempt(asked_for, gateway, work.prompt, work.answer)

    def close(self, key: AttemptKey, num_answered: int | None) -> None:
        """An attempt ends. A waiting attempt has used nothing; an unknown answer counts as expected."""
        was_active, attempt = self.is_active(key), self.open.pop(key)
        if was_active:
            answer = attempt.answer if num_answered is None else num_answered
            self.used[attempt.tenant] += attempt.prompt + answer
            if num_answered:
                self.estimator.learn_answer(attempt.tenant, num_answered)

    @rule(
        tenant=st.sampled_from("ab"),
        gateway=st.sampled_from("gh"),
        num_tokens=st.sampled_from([10, 100, LONG]),
        max_tokens=st.integers(1, 200),
        sla=st.sampled_from([Sla(), Sla(ttft_ms=60_000, tpot_ms=50)]),
    )
    def ask(self, tenant: str, gateway: str, num_tokens: int, max_tokens: int, sla: Sla) -> None:
        self.num_asked += 1
        self.say(
            gateway,
            asked(
                f"r{self.num_asked}",
                tenant,
                num_tokens=num_tokens,
                max_tokens=max_tokens,
                weight=WEIGHTS[tenant],
                quotas=QUOTAS,
                sla=sla,
            ),
        )

    @precondition(lambda self: self.open)
    @rule(data=st.data(), share=st.floats(0, 1))
    def compute(self, data: Any, share: float) -> None:
        """A report on a waiting or a computed prompt changes nothing."""
        key = self.draw(data)
        attempt = self.open[key]
        num_tokens = attempt.submit.request.num_tokens
        num_new = round(share * num_tokens)
        if self.is_active(key) and not attempt.is_computed:
            self.estimator.learn_prompt(attempt.tenant, num_new, num_tokens)
            prompt = min(attempt.prompt, num_new) if attempt.submit.is_begun else num_new
            self.open[key] = attempt._replace(prompt=prompt, is_computed=True)
        times = PrefillTimes(key[0], key[1], 0.0, 0.01, num_new, num_tokens)
        self.c["p0"].say(Measured(prefills=(times,)))

    @precondition(lambda self: any(map(self.is_active, self.open)))
    @rule(data=st.data())
    def start(self, data: Any) -> None:
        key = self.draw(data, active=True)
        self.c[self.open[key].gateway].say(Started(attempts=(key,)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), num_answered=st.none() | st.integers(0, 300))
    def end(self, data: Any, num_answered: int | None) -> None:
        """An attempt ends by itself, or because its client left; the attempt may still be waiting."""
        key = self.draw(data)
        gateway = self.open[key].gateway
        self.close(key, num_answered)
        num_tokens = () if num_answered is None else (num_answered,)
        self.c[gateway].say(Ended(attempts=(key,), num_tokens=num_tokens))

    @precondition(lambda self: any(map(self.is_active, self.open)))
    @rule(data=st.data(), num_answered=st.integers(0, 5))
    def fail(self, data: Any, num_answered: int) -> None:
        """The worker is lost: the gateway submits the request again."""
        key = self.draw(data, active=True)
        attempt = self.open[key]
        self.close(key, num_answered)
        self.c[attempt.gateway].say(Ended(attempts=(key,), num_tokens=(num_answered,)))
        request = msgspec.structs.replace(attempt.submit.request, attempt=key[1] + 1)
        self.say(attempt.gateway, Submit(request=request, is_begun=True))

    @rule()
    def gateway_leaves(self) -> None:
        for key in [key for key, attempt in self.open.items() if attempt.gateway == "h"]:
            self.close(key, None)
        self.c["h"].leave()
        self._connect_second_gateway()

    @invariant()
    def sums_are_exact(self) -> None:
        admission_queue = self.c.router.admission_queue
        admission_queue.check_integrity()
        clocks, lags = [], []
        for tenant, weight in WEIGHTS.items():
            of_tenant = {key: each for key, each in self.open.items() if each.tenant == tenant}
            active = [each.charge for key, each in of_tenant.items() if self.is_active(key)]
            quotas, charge = admission_queue.quotas, sum(each.charge for each in of_tenant.values())
            assert quotas.num_requests(tenant) == len(of_tenant)
            assert quotas.num_active(tenant) == len(active) <= MAX_ACTIVE
            level = BURST - self.used[tenant] - charge
            assert quotas.refusal(tenant, BUCKET, level - 1e-3) is None, tenant
            refused = quotas.refusal(tenant, BUCKET, level + 1e-3)
            assert level > BURST - 1 or (refused and refused.refusal is Refusal.TOKENS_PER_S), tenant
            clocks.append((self.used[tenant] + sum(active)) / weight)
            lags.append(admission_queue.queues.known_lag(SchedulingClass(tenant, weight)) or 0.0)
        assert abs((lags[1] - lags[0]) - (clocks[0] - clocks[1])) < 1e-3

    def teardown(self) -> None:
        for key in list(self.open):
            self.c[self.open[key].gateway].say(Ended(attempts=(key,)))
        admission_queue, quotas = self.c.router.admission_queue, self.c.router.admission_queue.quotas
        assert not len(admission_queue) and not len(self.c.router.in_flight)
        assert not any(quotas.num_requests(tenant) for tenant in WEIGHTS)
        overload, queues = admission_queue.overload, admission_queue.queues
        overload.update(queues, 0.0)  # forgets hopeless requests
        assert not overload.read(queues, 0.0).has_objectives


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_credit_of_an_absent_tenant_ends_with_ticks() -> None:
    c = next(a_cluster())
    fill(c)
    assert isinstance(submit(c, asked("x", "x", num_tokens=LONG))[0], Routed)
    submit(c, *(asked(f"a{n}", num_tokens=LONG) for n in range(3)))
    start(c, "f0", "f1")
    late = QueuedAttempt("g", asked("l", "late"), since_s=0.0, due_s=0.0, work=RequestWork(0.0, 1.0))
    assert c.router.admission_queue.queues.lag_of(late) > 0
    for _ in range(CREDIT_AGES):
        c.tick(0.5)
    assert c.router.admission_queue.queues.lag_of(late) == 0
