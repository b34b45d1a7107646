"""Numbered questions to peers: `Questions` alone; with gateways and routers in their own tests."""

import asyncio

import pytest

from baton.messages.bounds import Kind
from baton.messages.control import Hello
from baton.messages.operations import Decisions, Explain, FindRequests, FoundRequests
from baton.messages.timeline import RequestTimeline
from baton.rpc.questions import Questions
from tests.event_loop import on_loop
from tests.node_peers import ListeningPeer, id_of

NEVER_S = 600.0


def a_router() -> ListeningPeer:
    return ListeningPeer(Hello(process=Kind.ROUTER, id=id_of("router")))


@on_loop
async def test_lost_connection_ends_no_question_to_a_newer_one_of_the_same_process() -> None:
    questions, former, newer = Questions(), a_router(), a_router()
    explain = Explain(request_id=id_of("r"))
    answers = asyncio.create_task(questions.ask(explain, [newer], Decisions, NEVER_S))
    await asyncio.sleep(0)
    questions.lose(former)
    questions.take(newer, Decisions.answer_to(newer.only(Explain)))
    assert len(await answers) == 1


@pytest.mark.parametrize(("request_id", "num_answers"), [(id_of("r"), 2), (None, 3)])
@on_loop
async def test_question_for_one_request_ends_with_the_answer_that_has_it(
    request_id: str | None, num_answers: int
) -> None:
    questions, router = Questions(), a_router()
    query = FindRequests(request_id=request_id)
    answers = asyncio.create_task(questions.ask(query, [router], FoundRequests, NEVER_S))
    await asyncio.sleep(0)
    number = router.only(FindRequests).question
    timeline = RequestTimeline(request_id=id_of("r"), outcome="answered", began_s=0.0, total_s=1.0)
    for timelines in ((), (timeline,), ())[:num_answers]:
        assert not answers.done()
        questions.take(router, FoundRequests(question=number, num_asked=3, timelines=timelines))
    async with asyncio.timeout(5.0):
        assert len(await answers) == num_answers
