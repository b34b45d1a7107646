"""A proxy for each link of a cluster of bench/switched_process.py, by who dials whom and what for."""

import socketserver
import threading
from types import TracebackType
from typing import Final, NamedTuple, Self

from baton.bench.link_proxy import LinkProxy

HOST: Final = "127.0.0.1"


class Link(NamedTuple):
    dialer: str  # the name of a process
    kind: str  # "control", "page control" or "page data"
    target: tuple[str, int]


class Switchboard:
    """Listens at `port`; `links` are those that any process has asked for, oldest first."""

    def __init__(self) -> None:
        self.links: dict[Link, LinkProxy] = {}
        self._lock = threading.Lock()
        self._server = socketserver.ThreadingTCPServer((HOST, 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="switchboard", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for proxy in self.links.values():
            proxy.close()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def proxy(self, link: Link) -> LinkProxy:
        with self._lock:
            if link not in self.links:
                self.links[link] = LinkProxy(link.target)
            return self.links[link]

    def _handler(self) -> type[socketserver.StreamRequestHandler]:
        board = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                # A name may have spaces in its kind: the target is what comes last.
                dialer, rest = self.rfile.readline().decode().rstrip("\n").split(" ", 1)
                kind, host, port = rest.rsplit(" ", 2)
                where = board.proxy(Link(dialer, kind, (host, int(port)))).address
                self.wfile.write(f"{where[0]} {where[1]}\n".encode())

        return Handler
