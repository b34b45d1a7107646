"""What a router keeps of tenants is exact, whatever becomes of their requests: shares, buckets, counts."""

from collections import defaultdict
from typing import Any, Final, NamedTuple

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.fair_queue import CREDIT_AGES
from baton.messages.control import Ended, Measured, Rejected, Routed, Started, Submit
from baton.messages.workers import PrefillTimes
from baton.tenants import Quotas, Sla
from tests.node_peers import TestPeer, id_of
from tests.unit.router.queue_cases import asked
from tests.unit.router.reception_cases import LONG, answers, fill, submit
from tests.unit.router.router_cluster import Cluster, cluster

BURST: Final = 10**9
WEIGHTS: Final = {"a": 1.0, "b": 4.0}
MAX_ACTIVE: Final = 6
QUOTAS: Final = Quotas(
    tokens_per_s=1e-9, burst_tokens=BURST, max_active_sequences=MAX_ACTIVE, max_concurrent_requests=9
)

Key = tuple[str, int]


class Known(NamedTuple):
    """Of an attempt that has not ended."""

    submit: Submit
    gateway: str
    prompt: float  # tokens that it is charged
    answer: float
    is_computed: bool = False


class Accounts(RuleBasedStateMachine):
    """Time stands still, so nothing is forgiven: each tenant's sums must be those of its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.c: Cluster = cluster()
        for name in ("p0", "d0"):
            self.c.add(name, num_pages=10_000, max_num_seqs=64)
        self.open: dict[Key, Known] = {}
        self.used: defaultdict[str, float] = defaultdict(float)  # by what has ended
        self.num_asked = 0
        self._meet_other_gateway()
        for tenant, gateway in ("ag", "ah", "ag", "bh"):
            self.ask_for(tenant, gateway, LONG, 50, Sla())

    def _meet_other_gateway(self) -> None:
        self.c.peers["h"] = TestPeer.gateway(self.c.router, "h")
        self.c.all_reach_all()

    def is_active(self, key: Key) -> bool:
        return self.c.router.admission_queue._attempts[key].is_dispatched

    def draw(self, data: Any, *, active: bool | None = None) -> Key:
        keys = [key for key in self.open if active is None or self.is_active(key) is active]
        key: Key = data.draw(st.sampled_from(keys))
        return key

    def say(self, gateway: str, asked_for: Submit) -> None:
        key = (asked_for.request.request_id, asked_for.request.attempt)
        self.c[gateway].say(asked_for)
        if any(isinstance(each, Rejected) and each.request_id == key[0] for each in answers(self.c, gateway)):
            return
        work = self.c.router.admission_queue._attempts[key].charged
        self.open[key] = Known(asked_for, gateway, work.prompt, work.answer)

    def forget(self, key: Key, num_answered: int | None) -> None:
        """It has ended. What waited has used nothing; of what nobody knows the end, what was expected."""
        known, was_active = self.open.pop(key), self.is_active(key)
        if was_active:
            answer = known.answer if num_answered is None else num_answered
            self.used[known.submit.request.tenant] += known.prompt + answer

    @rule(
        tenant=st.sampled_from("ab"),
        gateway=st.sampled_from("gh"),
        num_tokens=st.sampled_from([10, 100, LONG]),
        max_tokens=st.integers(1, 200),
        sla=st.sampled_from([Sla(), Sla(ttft_ms=60_000, tpot_ms=50)]),
    )
    def ask(self, tenant: str, gateway: str, num_tokens: int, max_tokens: int, sla: Sla) -> None:
        self.ask_for(tenant, gateway, num_tokens, max_tokens, sla)

    def ask_for(self, tenant: str, gateway: str, num_tokens: int, max_tokens: int, sla: Sla) -> None:
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
        """Also what waits, or is computed already: that changes nothing."""
        key = self.draw(data)
        known, is_active = self.open[key], self.is_active(key)
        num_tokens = known.submit.request.num_tokens
        num_new = round(share * num_tokens)
        times = PrefillTimes(key[0], key[1], 0.0, 0.01, num_new, num_tokens)
        self.c["p0"].say(Measured(prefills=(times,)))
        if is_active and not known.is_computed:
            prompt = min(known.prompt, num_new) if known.submit.is_begun else num_new
            self.open[key] = known._replace(prompt=prompt, is_computed=True)

    @precondition(lambda self: any(map(self.is_active, self.open)))
    @rule(data=st.data())
    def start(self, data: Any) -> None:
        key = self.draw(data, active=True)
        self.c[self.open[key].gateway].say(Started(attempts=(key,)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), num_answered=st.none() | st.integers(0, 300))
    def end(self, data: Any, num_answered: int | None) -> None:
        """By itself, or because its client left: it may be waiting still."""
        key = self.draw(data)
        gateway = self.open[key].gateway
        self.forget(key, num_answered)
        num_tokens = () if num_answered is None else (num_answered,)
        self.c[gateway].say(Ended(attempts=(key,), num_tokens=num_tokens))

    @precondition(lambda self: any(map(self.is_active, self.open)))
    @rule(data=st.data(), num_answered=st.integers(0, 5))
    def fail(self, data: Any, num_answered: int) -> None:
        """Its worker was lost: its gateway tries again."""
        key = self.draw(data, active=True)
        known = self.open[key]
        self.forget(key, num_answered)
        self.c[known.gateway].say(Ended(attempts=(key,), num_tokens=(num_answered,)))
        request = msgspec.structs.replace(known.submit.request, attempt=key[1] + 1)
        self.say(known.gateway, Submit(request=request, is_begun=True))

    @rule()
    def gateway_leaves(self) -> None:
        for key in [key for key, known in self.open.items() if known.gateway == "h"]:
            self.forget(key, None)
        self.c["h"].leave()
        self._meet_other_gateway()

    @invariant()
    def sums_are_exact(self) -> None:
        admission_queue = self.c.router.admission_queue
        admission_queue.check_integrity()
        assert set(admission_queue._attempts) == set(self.open)
        for tenant, weight in WEIGHTS.items():
            mine = {key: known for key, known in self.open.items() if known.submit.request.tenant == tenant}
            work = {key: known.prompt + known.answer for key, known in mine.items()}
            active = sum(work[key] for key in mine if self.is_active(key))
            clock = admission_queue.queues._shares[0].clock(tenant)
            assert abs(clock * weight - self.used[tenant] - active) < 1e-3, tenant
            usage = admission_queue.quotas._tenants.get(tenant)
            if usage is not None and usage.bucket is not None:
                level = usage.bucket.level(self.c.clock.now_s())
                assert abs(BURST - level - self.used[tenant] - sum(work.values())) < 1e-3, tenant
                assert usage.num_active <= MAX_ACTIVE

    def teardown(self) -> None:
        for key in list(self.open):
            self.c[self.open[key].gateway].say(Ended(attempts=(key,)))
        admission_queue = self.c.router.admission_queue
        assert not len(admission_queue) and not admission_queue._attempts
        overload, queues = admission_queue.overload, admission_queue.queues
        overload.update(queues, 0.0)  # forgets hopeless requests
        assert not overload.read(queues, 0.0).has_objectives
        assert not len(self.c.router.in_flight)
        admission_queue.check_integrity()


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_credit_of_who_was_away_ends_with_ticks() -> None:
    c = cluster()
    for name in ("p0", "d0"):
        c.add(name, num_pages=10_000, max_num_seqs=64)
    fill(c)
    assert isinstance(submit(c, asked("x", "x", num_tokens=LONG))[0], Routed)
    share = c.router.admission_queue.queues._shares[0]
    submit(c, *(asked(f"a{n}", num_tokens=LONG) for n in range(3)))
    c["g"].say(Started(attempts=((id_of("f0"), 0), (id_of("f1"), 0))))
    assert share.present > share.clock("late") == 0
    for _ in range(CREDIT_AGES):
        c.tick(0.5)
    assert share.clock("late") == share.present
