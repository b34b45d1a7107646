import pytest

from baton.cluster.process_spec import ProcessSpec
from baton.cluster.serve_plan import Topology, router_ports, specs
from baton.config.cluster import ServeConfig, WorkerConfig
from baton.config.engine import EngineSettings
from baton.config.gateway import GatewayConfig
from baton.config.loader import build
from baton.config.router import RouterConfig
from baton.messages.workers import Address, WorkerRole

ROUTER = Address("127.0.0.1", 7000)


def plan(num_gpus: int = 0, **settings: object) -> list[ProcessSpec]:
    config = build(ServeConfig, {"model": "tiny", **settings})
    return specs(config, Topology(routers=(ROUTER,), host="", port=8000, num_gpus=num_gpus))


def workers(planned: list[ProcessSpec]) -> list[WorkerConfig]:
    return [spec.config for spec in planned if isinstance(spec.config, WorkerConfig)]


def test_every_process_knows_the_router() -> None:
    planned = plan(prefill={"num_workers": 2}, decode={"num_workers": 3}, gateways=2)
    workers = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    names = [*workers, "router-0", "gateway-0", "gateway-1"]
    assert [spec.name for spec in planned] == names
    for spec in planned:
        if isinstance(spec.config, RouterConfig):
            assert (spec.config.host, spec.config.port) == (ROUTER.host, ROUTER.port)
        else:
            assert isinstance(spec.config, WorkerConfig | GatewayConfig)
            assert spec.config.routers == (ROUTER,)


def test_routers_have_ports_of_their_own_and_one_redis() -> None:
    addresses = (ROUTER, Address("127.0.0.1", 7001))
    config = build(ServeConfig, {"model": "tiny", "routers": 2, "router": {"seed": 5}})
    planned = specs(config, Topology(routers=addresses, host="", port=8000, num_gpus=0, redis="unix:///r"))
    routers = [spec for spec in planned if isinstance(spec.config, RouterConfig)]
    assert [spec.name for spec in routers] == ["router-0", "router-1"]
    told = [spec.config for spec in routers if isinstance(spec.config, RouterConfig)]
    assert [Address(each.host, each.port) for each in told] == list(addresses)
    assert {each.redis for each in told} == {"unix:///r"}
    assert len({each.seed for each in told}) == 2
    assert all(each.routers == addresses for each in workers(planned))


@pytest.mark.parametrize(("port", "expected"), [(0, [0, 0, 0]), (7000, [7000, 7001, 7002])])
def test_a_port_that_is_given_is_the_first_routers(port: int, expected: list[int]) -> None:
    config = build(ServeConfig, {"model": "tiny", "routers": 3, "router": {"port": port}})
    assert router_ports(config) == expected


def test_gateways_share_the_port() -> None:
    gateways = [spec.config for spec in plan(gateways=2) if isinstance(spec.config, GatewayConfig)]
    assert [(gateway.port, gateway.shares_port) for gateway in gateways] == [(8000, True)] * 2


def test_roles_have_ranks_and_pages_of_their_own() -> None:
    planned = plan(prefill={"tensor_parallel_size": 2}, decode={"page_size": 64})
    prefill, decode = workers(planned)
    assert (prefill.role, prefill.engine.tensor_parallel_size) == (WorkerRole.PREFILL, 2)
    assert (decode.role, decode.engine.cache.page_size) == (WorkerRole.DECODE, 64)
    assert [spec.num_ranks for spec in planned] == [2, 1, 0, 0]


@pytest.mark.parametrize(
    ("num_gpus", "gpus_per_rank", "share"), [(0, 0.0, 0.9), (1, 0.5, 0.45), (2, 1.0, 0.9), (8, 1.0, 0.9)]
)
def test_ranks_share_gpus_that_are_fewer(num_gpus: int, gpus_per_rank: float, share: float) -> None:
    planned = plan(num_gpus)
    assert [spec.gpus_per_rank for spec in planned] == [gpus_per_rank] * 2 + [0.0] * 2
    assert [worker.engine.cache.gpu_memory_utilization for worker in workers(planned)] == [share] * 2


def test_device_cpu_is_used_beside_gpus() -> None:
    planned = plan(8, engine=EngineSettings(device="cpu"))
    assert [spec.gpus_per_rank for spec in planned] == [0.0] * 4


def test_policy_and_bounds_reach_the_router_and_the_workers() -> None:
    planned = plan(router={"policy": "round-robin", "local_prefill_tokens": 99}, transport="tcp")
    (router,) = [spec.config for spec in planned if isinstance(spec.config, RouterConfig)]
    assert (router.policy, router.local_prefill_tokens) == ("round-robin", 99)
    assert [worker.transport for worker in workers(planned)] == ["tcp"] * 2
