"""The real `openai` client, of a gateway over one engine in this process and of a whole cluster."""

from collections.abc import Iterator

import openai
import pytest

from baton.cluster.offline.llm import LLM
from tests.engine_frontend import EngineFrontend, tiny_engine
from tests.served import served as served_cluster
from tests.served_gateway import ServedGateway

Served = ServedGateway[EngineFrontend]


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
def cluster_client() -> Iterator[openai.OpenAI]:
    settings = ("--runtime", "local", "--kv-cache-memory", "64MiB", "--drain-timeout", "5")
    with served_cluster("tiny", *settings) as cluster, client_of(cluster.url) as client:
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
