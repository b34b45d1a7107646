"""The operators' routes, without the gate that keeps others out: see tests/e2e/test_http_access.py."""

import asyncio

import httpx2
from fastapi import FastAPI

from baton.gateway.api.admin import Explain, add_admin_routes
from baton.gateway.api.errors import as_api_error
from baton.gateway.streams.routers import Explained
from baton.messages.control import Decision, Weighed
from tests.node_peers import id_of

BEST = Weighed(decode=id_of("d1"), terms={"queue_s": 0.1, "compute_s": 0.4, "harm_s": 9.0})
CHOSEN = Weighed(decode=id_of("d0"), terms={"queue_s": 0.0, "compute_s": 0.8, "harm_s": 0.0})
DECISION = Decision(
    request_id=id_of("a"),
    attempt=0,
    age_s=1.0,
    reason="cost",
    num_tokens=3,
    chosen=CHOSEN,
    weighed=(CHOSEN, BEST),
    first_token_s=0.75,
)


def ask(explain: Explain, name: str) -> tuple[int, dict[str, object]]:
    app = FastAPI()
    add_admin_routes(app, explain)

    async def get() -> tuple[int, dict[str, object]]:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client:
            try:
                answer = await client.get(f"/admin/decisions/{name}")
            except Exception as error:  # what the gate answers
                return as_api_error(error).status, {}
            return answer.status_code, answer.json()

    return asyncio.run(get())


def test_decision_is_told_with_its_terms_and_its_regret() -> None:
    asked: list[str] = []

    def explain(request_id: str, told: Explained) -> None:
        asked.append(request_id)
        told((DECISION,))

    status, answer = ask(explain, f"chatcmpl-{id_of('a')}")
    assert (status, asked) == (200, [id_of("a")])
    assert isinstance(answer["data"], list)
    (decision,) = answer["data"]
    assert decision["chosen"]["terms"] == CHOSEN.terms
    assert [each["decode"] for each in decision["weighed"]] == [id_of("d0"), id_of("d1")]
    assert decision["regret_s"] == 0.25


def test_request_that_nobody_knows_is_not_found() -> None:
    assert ask(lambda _, told: told(()), id_of("a"))[0] == 404


def test_what_is_no_id_is_not_found_and_nobody_is_asked() -> None:
    def explain(request_id: str, told: Explained) -> None:
        raise AssertionError(request_id)

    for name in ("x", "chatcmpl-", id_of("a")[:-1] + "G", "a" * 33):
        assert ask(explain, name)[0] == 404


def test_without_a_router_it_may_be_asked_again() -> None:
    assert ask(lambda _, told: told(None), id_of("a"))[0] == 503
