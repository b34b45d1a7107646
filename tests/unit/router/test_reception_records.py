"""Whatever happens to a request at the router, its gateway hears of one end, once; none waits in vain."""

from collections import defaultdict
from random import Random
from typing import Final

from baton.messages.control import AttemptFailed, Ended, Rejected, Routed, Started
from baton.router.dispatcher import NoSlot, Unpaired
from baton.rpc.peers import TICK_S
from baton.tenants import Degradation, Quotas, Refusal, Sla
from tests.node_peers import TestPeer, id_of
from tests.unit.router.queue_cases import asked
from tests.unit.router.reception_cases import LONG
from tests.unit.router.router_cluster import Cluster, cluster

Key = tuple[str, int]
NUM_SEEDS: Final = 20
Told: Final = (Routed, Rejected, AttemptFailed)
SLAS: Final = (Sla(), Sla(ttft_ms=700), Sla(ttft_ms=60_000, tpot_ms=50), Sla(deadline_ms=2000))
QUOTAS: Final = (Quotas(), Quotas(), Quotas(max_queued=2), Quotas(max_active_sequences=2))
QUOTAS_OF_TOKENS: Final = Quotas(tokens_per_s=3000, burst_tokens=9000, max_concurrent_requests=5)


class Storm:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.c: Cluster = cluster(max_attempts=40)
        self.c.peers["h"] = TestPeer.gateway(self.c.router, "h")
        for name in ("p0", "d0", "d1"):
            self.c.add(name, num_pages=2000, max_num_seqs=4)
        self.asked: dict[Key, str] = {}  # attempt -> gateway
        self.heard: defaultdict[Key, list[type]] = defaultdict(list)
        self.left_alone: set[Key] = set()  # their gateways want nothing of them any more

    def run(self) -> None:
        steps = (*[self.ask] * 4, self.start, self.end, self.end, self.tick, self.lose_worker)
        for _ in range(250):
            self.random.choice(steps)()
            self.listen()
            self.c.router.admission_queue.check_integrity()
            self.check_no_attempt_waits_needlessly()
        self.finish()

    def ask(self) -> None:
        random, number = self.random, len(self.asked)
        tenant, gateway = random.choice("abc"), random.choice("gh")
        submit = asked(
            f"r{number}",
            tenant,
            num_tokens=random.choice((10, 500, LONG)),
            sla=random.choice(SLAS),
            attempt=random.choice((0, 0, 0, 1)),
            priority=random.randrange(2),
            quotas=QUOTAS_OF_TOKENS if tenant == "a" else random.choice(QUOTAS),
            degradation=Degradation(may_shed=random.random() < 0.7),
            rank="abc".index(tenant),
        )
        self.asked[id_of(f"r{number}"), submit.request.attempt] = gateway
        self.c[gateway].say(submit)

    def start(self) -> None:
        if key := self.any_routed():
            self.c[self.asked[key]].say(Started(attempts=(key,)))

    def end(self) -> None:
        """By itself, or as its client leaves, wherever it is."""
        keys = [key for key in self.asked if self.may_end(key)]
        if keys:
            key = self.random.choice(keys)
            self.left_alone.add(key)
            self.c[self.asked[key]].say(Ended(attempts=(key,), num_tokens=(self.random.randrange(9),)))

    def tick(self) -> None:
        if self.random.random() < 0.5:
            self.c.router.admission_queue.overload.count_hopeless()
        at_work = tuple(key for key in self.asked if self.heard[key] == [Routed] and self.may_end(key))
        for name in ("p0", "d0", "d1"):
            self.c.beat(name, attempts=at_work)
        self.c.tick(self.random.choice((TICK_S, 1.0)))

    def lose_worker(self) -> None:
        if self.random.random() < 0.1:
            name = self.random.choice(("p0", "d0", "d1"))
            self.c[name].leave()
            self.listen()
            self.c.add(name, num_pages=2000, max_num_seqs=4)

    def may_end(self, key: Key) -> bool:
        return key not in self.left_alone and Rejected not in self.heard[key]

    def any_routed(self) -> Key | None:
        keys = [key for key in self.asked if self.may_end(key) and self.heard[key] == [Routed]]
        return self.random.choice(keys) if keys else None

    def listen(self) -> None:
        for gateway in "gh":
            received = [each for each in self.c[gateway].received if isinstance(each, Told)]
            self.c[gateway].received.clear()
            for message in received:
                key = (message.request_id, message.attempt)
                assert self.asked[key] == gateway
                self.heard[key].append(type(message))
                if isinstance(message, AttemptFailed) and key not in self.left_alone:  # it is made again
                    self.left_alone.add(key)
                    self.c[gateway].say(Ended(attempts=(key,)))
        for key, heard in self.heard.items():
            assert heard in ([], [Routed], [Rejected], [Routed, AttemptFailed]), (key, heard)

    def check_no_attempt_waits_needlessly(self) -> None:
        """Assert that no worker has room for the first queued attempt."""
        first, dispatcher = self.c.router.admission_queue.first(), self.c.router._dispatcher
        if first is not None:
            gateway = self.c.router._gateways[first.gateway]
            pair = dispatcher._pair(gateway, first, self.c.router.admission_queue.claim(first))
            assert pair is Unpaired.FULL or isinstance(pair, NoSlot)

    def finish(self) -> None:
        """Everybody leaves: nothing is left."""
        self.listen()
        waiting = {key for key in self.asked if key in self.c.router.admission_queue}
        silent = {key for key in self.asked if not self.heard[key] and key not in self.left_alone}
        assert silent == waiting, "who hears nothing waits"
        for gateway in "gh":
            self.c[gateway].leave()
        assert len(self.c.router.admission_queue) == len(self.c.router.in_flight) == 0
        self.c.router.admission_queue.check_integrity()
        assert not self.c.router.admission_queue._attempts


def test_every_request_has_one_end_and_none_waits_in_vain() -> None:
    kinds, refusals = set[type](), set[Refusal]()
    for seed in range(NUM_SEEDS):
        storm = Storm(seed)
        storm.run()
        kinds |= {kind for heard in storm.heard.values() for kind in heard}
        refusals |= {each for tenant in storm.c.router.status().queue.tenants for each in tenant.refused}
    assert kinds == set(Told) and len(refusals) >= 6, "many kinds of ends are met"
