"""Routes of operators, without the auth middleware; tests/e2e/test_http_access.py tests the middleware."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from fastapi import FastAPI

from baton.adapters import CONFIG_FILE, WEIGHTS_FILE
from baton.clock import ManualClock
from baton.errors import BatonError, InvalidRequest, Overloaded, WorkerLost
from baton.gateway.api.adapters import LoadAdapter, ServedAdapters, UnloadAdapter
from baton.gateway.api.admin import FRESH_S, Canary, Find, add_admin_routes
from baton.gateway.api.body_reader import BodyReader, ServedModel, ServedModels
from baton.gateway.api.errors import ApiError, as_api_error
from baton.gateway.api.prompt_reader import PromptReader
from baton.gateway.peer_gateways import PeerGateways
from baton.messages.bounds import Kind
from baton.messages.control import Decision, Weighed
from baton.messages.operations import Decisions, Explain, FindRequests, FoundRequests
from baton.messages.timeline import RequestTimeline, TimelinePart
from baton.messages.workers import Address, PrefillTimes, WorkerRole
from baton.rpc.auth import KeyRing
from tests.event_loop import on_loop
from tests.node_peers import id_of
from tests.scripted_service import ScriptedService, answer_at_once, worker

BEST = Weighed(decode=id_of("d1"), terms={"queue_s": 0.1, "compute_s": 0.4, "decode_delay_s": 9.0})
CHOSEN = Weighed(decode=id_of("d0"), terms={"queue_s": 0.0, "compute_s": 0.8, "decode_delay_s": 0.0})
DECISION = Decision(
    request_id=id_of("a"),
    attempt=0,
    age_s=1.0,
    reason="cost",
    num_tokens=3,
    chosen=CHOSEN,
    weighed=(CHOSEN, BEST),
    measured=PrefillTimes(id_of("a"), 0, waited_s=0.25, computed_s=9.5, num_new_tokens=3, num_tokens=3),
)


class ToldDecisions(ScriptedService):
    """Routers that tell these decisions of any request. None: no router answers."""

    def __init__(self, decisions: tuple[Decision, ...] | None) -> None:
        super().__init__()
        self.decisions, self.asked = decisions, list[str]()

    async def explain(self, question: Explain, timeout_s: float) -> list[Decisions]:
        self.asked.append(question.request_id)
        return [] if self.decisions is None else [Decisions(decisions=self.decisions)]

    async def get(self, name: str) -> tuple[int, dict[str, Any]]:
        return await get(self, lambda query: (), f"/admin/decisions/{name}")


async def get(service: ScriptedService, find: Find, path: str) -> tuple[int, dict[str, Any]]:
    app = FastAPI()
    add_admin_routes(app, service, find)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client:
        try:
            answer = await client.get(path)
        except Exception as error:  # the middleware answers with this status
            return as_api_error(error).status, {}
        return answer.status_code, answer.json()


@on_loop
async def test_decision_has_its_terms_and_its_regret() -> None:
    service = ToldDecisions((DECISION,))
    status, answer = await service.get(f"chatcmpl-{id_of('a')}")
    assert (status, service.asked) == (200, [id_of("a")])
    assert (await service.get(f"resp_{id_of('a')}"))[1] == answer
    (decision,) = answer["data"]
    assert decision["chosen"]["terms"] == CHOSEN.terms
    assert [each["decode"] for each in decision["weighed"]] == [id_of("d0"), id_of("d1")]
    assert decision["regret_s"] == 0.25


@on_loop
async def test_unknown_request_is_not_found() -> None:
    assert (await ToldDecisions(()).get(id_of("a")))[0] == 404


@on_loop
async def test_malformed_id_is_not_found_without_a_question() -> None:
    service = ToldDecisions((DECISION,))
    for name in ("x", "chatcmpl-", id_of("a")[:-1] + "G", "a" * 33):
        assert (await service.get(name))[0] == 404
    assert not service.asked


@on_loop
async def test_without_a_router_the_answer_is_503() -> None:
    assert (await ToldDecisions(None).get(id_of("a")))[0] == 503


@on_loop
async def test_result_of_a_check_is_good_for_a_second() -> None:
    service, clock = ScriptedService(answer_at_once([1, 2])), ManualClock()
    canary = Canary(service, clock)
    await canary.check()
    clock.advance(FRESH_S / 2)
    await canary.check()
    assert len(service.requests) == 1
    clock.advance(FRESH_S)
    await canary.check()
    first, second = service.requests
    assert first.token_ids != second.token_ids  # no prefix cache answers for a worker


@on_loop
async def test_prompt_of_the_canary_is_longer_than_two_pages() -> None:
    service = ScriptedService(answer_at_once([1, 2]))
    service.workers = (worker(page_size=64), worker(page_size=16))
    await Canary(service, ManualClock()).check()
    assert len(service.requests[0].token_ids) == 129
    service.workers = (worker(page_size=64, max_model_len=40),)
    await Canary(service, ManualClock()).check()
    assert len(service.requests[1].token_ids) == 38


@on_loop
async def test_concurrent_checks_share_one_request() -> None:
    service = ScriptedService()
    canary = Canary(service, ManualClock())
    asking = [asyncio.create_task(canary.check()) for _ in range(5)]
    while not service.requests:
        await asyncio.sleep(0)
    answer_at_once([1, 2])(service, service.requests[0])
    await asyncio.gather(*asking)
    assert len(service.requests) == 1


@pytest.mark.parametrize("error", [WorkerLost("x"), InvalidRequest("x")])
@on_loop
async def test_failure_is_raised_and_not_kept(error: BatonError) -> None:
    service = ScriptedService(lambda service, request: service.fail(request.request_id, error))
    canary = Canary(service, ManualClock())
    with pytest.raises(type(error)):
        await canary.check()
    service.play = answer_at_once([1, 2])
    await canary.check()


@on_loop
async def test_silence_is_a_failure() -> None:
    service = ScriptedService()
    with pytest.raises(WorkerLost, match="no answer within 0.01 s"):
        await Canary(service, ManualClock(), timeout_s=0.01).check()
    assert len(service.cancelled) == 1


PREFILL = msgspec.structs.replace(worker(), id="b" * 32, name="prefill-0", role=WorkerRole.PREFILL)


def apart() -> ScriptedService:
    """A prefill and a decode worker, that answer."""
    service = ScriptedService(answer_at_once([1, 2]))
    service.workers = (worker(), PREFILL)
    return service


@on_loop
async def test_prefill_worker_that_has_left_is_missed() -> None:
    service, clock = apart(), ManualClock()
    canary = Canary(service, clock)
    await canary.check()
    assert service.requests[0].is_probe
    service.workers = (worker(),)
    clock.advance(FRESH_S)
    with pytest.raises(Overloaded, match="no prefill worker"):
        await canary.check()
    assert len(service.requests) == 1


@on_loop
async def test_configured_prefill_worker_is_missed_from_the_beginning() -> None:
    service = apart()
    service.workers = (worker(),)
    with pytest.raises(Overloaded, match="no prefill worker"):
        await Canary(service, ManualClock(), expects_prefill=True).check()


@on_loop
async def test_prefill_worker_that_sleeps_beside_an_awake_decode_worker_is_not_probed() -> None:
    """As after a kill of the decode worker while both slept: it is started awake."""
    service = apart()
    service.workers = [
        msgspec.structs.replace(each, is_asleep=each.role is WorkerRole.PREFILL) for each in service.workers
    ]
    await Canary(service, ManualClock(), expects_prefill=True).check()
    (request,) = service.requests
    assert not request.is_probe


@pytest.mark.parametrize("model", ["", "one of several"])
@on_loop
async def test_probe_goes_before_all_requests_of_clients(model: str) -> None:
    """A long queue must not make a healthy gateway leave its load balancer."""
    service = ScriptedService(answer_at_once([1, 2]))
    service.workers = (msgspec.structs.replace(worker(), model=model),)
    await Canary(service, ManualClock(), model=model, expects_prefill=False).check()
    (request,) = service.requests
    assert request.priority == -(2**31)  # the lowest that a body may give


# Timelines.


def a_timeline(name: str, total_s: float, began_s: float = 1.7e9, **fields: object) -> RequestTimeline:
    return RequestTimeline(
        request_id=id_of(name),
        outcome="answered",
        began_s=began_s,
        total_s=total_s,
        parts=(TimelinePart("queued", 0.0, total_s / 2, "router 1"),),
        unaccounted_s=total_s / 2,
        **fields,  # type: ignore[arg-type]
    )


class TwoGateways(ScriptedService):
    """This gateway's requests, and those of another gateway, which the service asks."""

    def __init__(self, own: list[RequestTimeline], others: list[RequestTimeline] | None) -> None:
        """others: None: the other gateway never answers."""
        super().__init__()
        self.own, self.others = own, others
        self.queries: list[FindRequests] = []

    def find(self, query: FindRequests) -> list[RequestTimeline]:
        return [each for each in self.own if query.request_id in (None, each.request_id)]

    async def find_requests(self, query: FindRequests, timeout_s: float) -> list[FoundRequests]:
        self.queries.append(query)
        told = [FoundRequests(timelines=tuple(self.find(query)))]  # a router asks this gateway, too
        if self.others is not None:
            of_id = [each for each in self.others if query.request_id in (None, each.request_id)]
            told.append(FoundRequests(timelines=tuple(of_id)))
        return told

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        return await get(self, self.find, path)


@on_loop
async def test_slowest_requests_of_all_gateways_come_in_one_order_and_once() -> None:
    gateways = TwoGateways([a_timeline("a", 1.0), a_timeline("b", 3.0)], [a_timeline("c", 2.0)])
    status, listed = await gateways.get("/admin/requests?order=slowest&limit=2&tenant=acme")
    assert status == 200
    assert [each["request_id"] for each in listed["data"]] == [id_of("b"), id_of("c")]
    assert listed["data"][0]["seconds"] == {"queued": 1.5, "unaccounted": 1.5}
    assert listed["data"][0]["num_attempts"] == 0 and "parts" not in listed["data"][0]
    (query,) = gateways.queries
    assert (query.order, query.limit, query.tenant) == ("slowest", 2, "acme")


@on_loop
async def test_latest_requests_are_those_that_ended_last() -> None:
    own = [a_timeline("a", 9.0, 1000.0), a_timeline("b", 1.0, 1005.0)]
    status, listed = await TwoGateways(own, [a_timeline("c", 1.0, 1007.5)]).get("/admin/requests")
    assert status == 200
    assert [each["request_id"] for each in listed["data"]] == [id_of("a"), id_of("c"), id_of("b")]


@on_loop
async def test_gateway_that_does_not_answer_is_left_out() -> None:
    status, listed = await TwoGateways([a_timeline("a", 1.0)], None).get("/admin/requests")
    assert (status, len(listed["data"])) == (200, 1)


@on_loop
async def test_timeline_is_found_here_without_a_question_or_at_another_gateway() -> None:
    gateways = TwoGateways([a_timeline("a", 1.0)], [a_timeline("c", 2.0)])
    status, found = await gateways.get(f"/admin/requests/chatcmpl-{id_of('a')}")
    assert status == 200 and not gateways.queries
    assert found["parts"] == [{"name": "queued", "begin_s": 0.0, "seconds": 0.5, "process": "router 1"}]
    assert found["seconds"] == {"queued": 0.5, "unaccounted": 0.5}
    status, found = await gateways.get(f"/admin/requests/{id_of('c')}")
    assert (status, found["total_s"], len(gateways.queries)) == (200, 2.0, 1)


@on_loop
async def test_timeline_that_no_gateway_has_is_not_found() -> None:
    gateways = TwoGateways([], [])
    for name in (id_of("a"), "x", "a" * 33):
        assert (await gateways.get(f"/admin/requests/{name}"))[0] == 404


@pytest.mark.parametrize(
    "query",
    [
        *("order=fastest", "limit=0", "limit=101", "limit=x", "sort=1"),
        *("limit=" + 5000 * "9", "limit=%D9%A3", "tenant=" + 129 * "x"),
    ],
)
@on_loop
async def test_query_that_is_not_known_is_refused(query: str) -> None:
    assert (await TwoGateways([], []).get(f"/admin/requests?{query}"))[0] == 400


# Adapters of the gateways behind one port.


class Gateway:
    """The adapters of one gateway, whose workers take any."""

    def __init__(self, peers: PeerGateways, names: Sequence[str]) -> None:
        self.service = ScriptedService(answer_at_once([1]))
        reader = BodyReader(PromptReader(None, None))
        self.models = ServedModels(
            [
                ServedModel(name=name, key=name, bodies=reader, service=self.service, created_s=0)
                for name in names
            ]
        )
        self.adapters = ServedAdapters(self.models, peers, ManualClock())
        self.peers = peers

    @property
    def paths(self) -> dict[str, str]:
        return {name: each.adapter.path for model in self.models for name, each in model.adapters.items()}

    @property
    def bases(self) -> dict[str, str]:
        return {name: model.name for model in self.models for name in model.adapters}


@asynccontextmanager
async def two_gateways(*models: str) -> AsyncIterator[tuple[Gateway, Gateway]]:
    key = secrets.token_bytes(32)
    ring = KeyRing.of(key, Kind.GATEWAY)
    names = models or ("tiny",)
    gateways = Gateway(PeerGateways(ring), names), Gateway(PeerGateways(ring), names)
    for each in gateways:
        each.peers.listen(Address("127.0.0.1", int.from_bytes(key[:2], "big") + 1))
    try:
        yield gateways
    finally:
        for each in gateways:
            await each.peers.close()


def adapter_in(folder: Path, *, alpha: int = 1) -> LoadAdapter:
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": alpha}
    (folder / CONFIG_FILE).write_text(msgspec.json.encode(config).decode())
    (folder / WEIGHTS_FILE).write_bytes(b"")
    return LoadAdapter("one", str(folder), load_inplace=True)


@on_loop
async def test_gateways_that_load_at_once_serve_the_same_adapter(tmp_path: Path) -> None:
    asked = [adapter_in(tmp_path / name, alpha=alpha) for alpha, name in enumerate("ab", 1)]
    async with two_gateways() as (first, second):
        for _ in range(4):
            await asyncio.gather(first.adapters.load(asked[0]), second.adapters.load(asked[1]))
            await first.adapters.exchange()
            assert first.paths == second.paths and len(first.paths) == 1


@on_loop
async def test_gateway_that_missed_changes_has_them_after_an_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_gateways() as (first, second):
        await first.adapters.load(adapter_in(tmp_path))
        assert first.paths == second.paths == {"one": str(tmp_path)}
        with monkeypatch.context() as away:
            away.setattr(first.peers, "_names", lambda: ())
            await first.adapters.unload(UnloadAdapter("one"))
        assert not first.paths and second.paths
        await second.adapters.exchange()
        assert not second.paths
        await second.adapters.load(adapter_in(tmp_path))
        assert first.paths == second.paths == {"one": str(tmp_path)}


@on_loop
async def test_adapter_is_loaded_once_unless_it_is_replaced(tmp_path: Path) -> None:
    async with two_gateways() as (first, second):
        await first.adapters.load(adapter_in(tmp_path))
        again = msgspec.structs.replace(adapter_in(tmp_path), load_inplace=False)
        with pytest.raises(ApiError, match="already been loaded"):
            await second.adapters.load(again)
        with pytest.raises(ApiError, match="too long"):
            await first.adapters.load(LoadAdapter("two", "/" + "a" * 300))


@on_loop
async def test_adapter_of_one_of_several_models_names_its_base(tmp_path: Path) -> None:
    asked = adapter_in(tmp_path)
    async with two_gateways("a", "b") as (first, second):
        for base in (None, "c", "one"):
            with pytest.raises(ApiError, match="base_model_name: name one of 'a', 'b'"):
                await first.adapters.load(msgspec.structs.replace(asked, base_model_name=base))
        await first.adapters.load(msgspec.structs.replace(asked, base_model_name="b"))
        assert [request.model for request in first.service.requests] == ["b"]
        assert first.bases == second.bases == {"one": "b"}
        assert second.models.of("one").name == "b"
        await second.adapters.load(msgspec.structs.replace(asked, base_model_name="a"))
        assert first.bases == second.bases == {"one": "a"}
        taken = msgspec.structs.replace(asked, lora_name="b", base_model_name="a")
        with pytest.raises(ApiError, match="already been loaded"):
            await first.adapters.load(taken)
        await first.adapters.unload(UnloadAdapter("one"))
        assert not first.bases and not second.bases
