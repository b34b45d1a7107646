"""The real `openai` client, of a gateway over one engine in this process and of a whole cluster."""

from collections.abc import Iterator

import openai
import pytest

from baton.cluster.offline.llm import LLM
from tests.engine_frontend import EngineFrontend, tiny_engine
from tests.served import Served as ServedCluster
from tests.served_gateway import ServedGateway
from tests.shared_clusters import SharedClusters, group_of

Served = ServedGateway[EngineFrontend]
SHARED = SharedClusters()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the shared clusters when the next test is of another group."""
    if nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid):
        SHARED.close()


@pytest.fixture(scope="module")
def plain_cluster() -> ServedCluster:
    """A cluster that several files share: tests ask it, and hurt nothing."""
    return SHARED.get()


@pytest.fixture(scope="module")
def redundant_cluster() -> ServedCluster:
    """A shared cluster of two gateways and two decode workers. Tests kill processes; others come back."""
    return SHARED.get(
        "--gateways", "2", "--decode", "2", "--enable-lora", BATON_GATEWAY_MAX_WAIT_S="300"
    )  # of a slow machine


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = tiny_engine()
    with ServedGateway(lambda: EngineFrontend(engine)) as gateway:
        yield gateway
    gateway.service.close()


@pytest.fixture(scope="module")
def engine_client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served.url) as client:
        yield client


@pytest.fixture(scope="module")
def cluster_client(plain_cluster: ServedCluster) -> Iterator[openai.OpenAI]:
    with client_of(plain_cluster.url) as client:
        yield client


@pytest.fixture(scope="module", params=["engine", "cluster"])
def client(request: pytest.FixtureRequest) -> openai.OpenAI:
    client = request.getfixturevalue(f"{request.param}_client")
    assert isinstance(client, openai.OpenAI)
    return client


def client_of(url: str) -> openai.OpenAI:
    base_url = f"{url.removesuffix('/v1')}/v1"
    return openai.OpenAI(base_url=base_url, api_key="none is needed", max_retries=0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny") as llm:
        yield llm
