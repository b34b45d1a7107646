"""The watch as Ray Serve calls it; a gateway that a test decides about answers it, over a real socket."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from baton.cluster.runtimes import ray_service
from baton.cluster.runtimes.ray_service import GatewayWatch
from tests.http_answers import Answering, serving


class Answers:
    """path -> status, and who has asked."""

    def __init__(self) -> None:
        self.statuses = {"/health": 200, "/ping": 200}
        self.has_asked = threading.Event()


def gateway(answers: Answers) -> AbstractContextManager[int]:
    """Answer as a gateway does; yields the port."""

    class Gateway(Answering):
        def get(self) -> None:
            answers.has_asked.set()
            self.answer(answers.statuses[self.path])

    return serving(Gateway)


def test_watch_is_ready_once_baton_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_service, "LOOK_EVERY_S", 0.001)
    answers = Answers()
    answers.statuses["/health"] = 503
    with gateway(answers) as port, ThreadPoolExecutor(1) as thread:
        watch = thread.submit(GatewayWatch, port)
        assert answers.has_asked.wait(30) and not watch.done()
        answers.statuses["/health"] = 200
        watch.result(30).check_health()


def test_a_gateway_that_is_gone_or_fails_is_told() -> None:
    answers = Answers()
    with gateway(answers) as port:
        watch = GatewayWatch(port)
        answers.statuses["/ping"] = 500
        with pytest.raises(RuntimeError, match="/ping has status 500"):
            watch.check_health()
    with pytest.raises(RuntimeError, match=f"no gateway of Baton lives at port {port}: .*refused"):
        watch.check_health()


def test_missing_workers_do_not_make_the_cluster_unhealthy() -> None:
    answers = Answers()
    with gateway(answers) as port:
        watch = GatewayWatch(port)
        answers.statuses["/health"] = 503
        watch.check_health()
        assert str(port) in watch(None)
