"""The real `openai` client, of a gateway over one engine in this process and of a whole cluster."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import openai
import pytest

from baton.cluster.offline.llm import LLM
from tests.engine_frontend import EngineFrontend, served_engine, tiny_engine
from tests.groups import group_of
from tests.scripted_service import ScriptedService, answer_at_once
from tests.served import Served as ServedCluster
from tests.served_gateway import ServedGateway
from tests.shared_clusters import SharedClusters
from tests.tenant_clients import write_tenants
from tests.tool_model import TEMPLATE, tool_model

REASONING: Final = "{# </think> #}{% if enable_thinking is defined %}thinks: {{ enable_thinking }}{% endif %}"
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
    options = ("--gateways", "2", "--decode", "2", "--enable-lora")
    return SHARED.get(*options, BATON_GATEWAY_MAX_WAIT_S="300")  # the machine may be slow


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with served_engine(tiny_engine()) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGateway[ScriptedService]]:
    """A gateway of a model that knows tools and reasoning. Tests set `service.play`."""
    model = tool_model(tmp_path_factory.mktemp("model"), TEMPLATE + REASONING)
    with ServedGateway(lambda: ScriptedService(answer_at_once([300])), model=model) as gateway:
        yield gateway


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


def client_of(url: str, key: str = "none is needed", max_retries: int = 0) -> openai.OpenAI:
    base_url = f"{url.removesuffix('/v1')}/v1"
    return openai.OpenAI(base_url=base_url, api_key=key, max_retries=max_retries)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of three tenants."""
    return write_tenants(tmp_path)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny") as llm:
        yield llm
