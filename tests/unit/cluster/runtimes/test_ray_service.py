"""The watch as Ray Serve calls it; a gateway that a test decides about answers it, over a real socket."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from baton.cluster.runtimes import ray_service
from baton.cluster.runtimes.ray_service import GatewayWatch


class Answers:
    """path -> status, and who has asked."""

    def __init__(self) -> None:
        self.statuses = {"/health": 200, "/ping": 200}
        self.has_asked = threading.Event()


@contextmanager
def gateway(answers: Answers) -> Iterator[int]:
    """Answer as a gateway does; yields the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers.has_asked.set()
            self.send_response(answers.statuses[self.path])
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


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
