"""A simulated cluster with clients, of which a gateway's metrics can be scraped in virtual time."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from baton.gateway.metrics.exporter import Exporter
from baton.gateway.metrics.metrics import Metrics
from baton.messages.operations import Status
from baton.messages.workers import WorkerRole
from baton.request import Request, SamplingParams, TokenEvent, TokenIds
from baton.router.policies.cost import CostPolicy
from baton.sim.clients import SimClient
from baton.sim.deployment import Deployment, SimContext, SimGateway, SimRouter, SimWorker
from baton.sim.engine import NUM_WORDS
from baton.sim.network import Network, Recorder
from baton.sim.process import Events
from baton.sim.world import LIMITS
from tests.metric_scrapes import INTERVAL_S, Scrapes
from tests.scripted_service import ScriptedService

FIRST_S: Final = 2.0  # until the first request: the cluster is complete
REQUESTS_A_SECOND: Final = 0.2
NUM_DOCUMENTS: Final = 4  # that prompts begin with
ROUTE: Final = "/v1/completions"


class MeteredClient(SimClient):
    """A client whose answer is counted as the HTTP layer of a gateway counts it."""

    def __init__(self, request: Request, events: Events, metrics: Metrics) -> None:
        super().__init__(request, events)
        self._metrics = metrics
        self._last_s: float | None = None
        metrics.prompt_tokens += len(request.token_ids)

    def tokens(self, events: Sequence[TokenEvent]) -> None:
        super().tokens(events)
        now_s, metrics = self.ended_s, self._metrics
        if self._last_s is None:
            metrics.ttft.observe(now_s - self.opened_s)
        else:
            metrics.itl.observe(now_s - self._last_s)
        self._last_s = now_s
        metrics.generated_tokens += len(events)
        if self.finish_reason is not None:
            metrics.duration.observe(now_s - self.opened_s)
            metrics.answered(ROUTE, 200)


class MeteredCluster:
    """Two or more workers of each role, which the policy `cost` chooses among; one scrape each minute."""

    def __init__(self) -> None:
        self.events, self.deployment = _deployment()
        self.metrics = Metrics(gateway="gateway")
        self.clients: list[MeteredClient] = []
        self._service = ScriptedService()
        self._exporter = Exporter(self.metrics, self._service, models=["numbers"], vllm_names=False)
        self._random = Random(0)
        self._documents = [self._random.choices(range(NUM_WORDS), k=48) for _ in range(NUM_DOCUMENTS)]
        self.events.after(FIRST_S, self._ask)

    @property
    def workers(self) -> list[SimWorker]:
        return self.deployment.lives(SimWorker)

    def status(self) -> Status:
        """Return the status that gateways get from the router."""
        (router,) = self.deployment.lives(SimRouter)
        return router.router.status()

    def run(self, num_minutes: int, each_minute: Callable[[int], None] = lambda minute: None) -> Scrapes:
        """Scrape at minute 0, and each minute from then on. each_minute: called before the minute passes."""
        scrapes = Scrapes()
        for minute in range(num_minutes + 1):
            self.events.run_until(FIRST_S + INTERVAL_S * minute)
            self._service.status = self.status()
            scrapes.add(self._exporter.text([self.metrics]))
            each_minute(minute)
        return scrapes

    def _ask(self) -> None:
        random, (gateway, *_) = self._random, self.deployment.lives(SimGateway)
        known = random.choice(self._documents)[: random.choice((16, 32, 48))]
        prompt = known + random.choices(range(NUM_WORDS), k=random.randint(1, 20))
        sampling = SamplingParams(max_tokens=random.choice((5, 12, 24)), seed=random.getrandbits(62))
        request = Request(
            request_id=random.randbytes(16).hex(),
            token_ids=TokenIds.of(prompt),
            sampling=sampling,
            arrival_s=gateway.process.clock.now_s(),
        )
        self.clients.append(MeteredClient(request, self.events, self.metrics))
        self.clients[-1].open(gateway)
        self.events.after(random.expovariate(REQUESTS_A_SECOND), self._ask)


def _deployment() -> tuple[Events, Deployment]:
    """Return the cluster of the first seed with the policy, enough workers, one router and one gateway."""
    for seed in range(1000):
        events, draws = (
            Events(),
            [Random(f"{seed} {name}") for name in ("network", "ids", "cluster", "nodes")],
        )
        network, ids, cluster, nodes = draws
        context = SimContext(events, Network(events, network), ids, Recorder(events, None), LIMITS)
        deployment = Deployment(context, cluster, nodes)
        routers, gateways = deployment.lives(SimRouter), deployment.lives(SimGateway)
        roles = [each.described.role for each in deployment.lives(SimWorker)]
        is_cost = type(routers[0].router.cluster_state.policy) is CostPolicy
        if (
            is_cost
            and len(routers) == len(gateways) == 1
            and min(roles.count(role) for role in WorkerRole) >= 2
        ):
            return events, deployment
    raise AssertionError("no seed draws such a cluster")
