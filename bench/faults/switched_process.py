"""A process of the cluster whose connections lead through proxies.

`python -m baton.bench.faults.switched_process PORT` is `baton.cluster.process` but for one thing: before it
connects to another process it asks the switchboard (bench/faults/link_proxy.py) at PORT for the address of a
proxy. The switchboard learns the name of the process that dials, so every link of a cluster has a proxy of
its own, and processes announce the addresses that they always announce.
"""

import socket
import sys
import threading
from typing import Any, Final

from baton.cluster import process
from baton.cluster.process_spec import Assignment
from baton.messages.workers import Address
from baton.rpc.server import RpcServer

HOST: Final = "127.0.0.1"
ANSWER_TIMEOUT_S: Final = 5.0


class Exchange:
    """Where this process connects to instead; asked once for each address."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port
        self._known: dict[tuple[str, int], tuple[str, int]] = {}
        self._lock = threading.Lock()

    def through(self, address: tuple[str, int], kind: str) -> tuple[str, int]:
        with self._lock:
            if address not in self._known:
                self._known[address] = self._ask(address, kind)
            return self._known[address]

    def _ask(self, address: tuple[str, int], kind: str) -> tuple[str, int]:
        with socket.create_connection((HOST, self._port), ANSWER_TIMEOUT_S) as sock:
            sock.sendall(f"{self._name} {kind} {address[0]} {address[1]}\n".encode())
            host, port = sock.makefile().readline().split()
        return host, int(port)


def _switch(exchange: Exchange, kind: str) -> None:
    """Lead through proxies what a hub dials; of a worker also what is said of pages, and their bytes."""
    dial = RpcServer.dial

    def dial_through(self: RpcServer, address: Address) -> None:
        dial(self, Address(*exchange.through((address.host, address.port), "control")))

    RpcServer.dial = dial_through  # type: ignore[method-assign]
    if kind != "worker":  # a router and a gateway need no torch
        return
    from baton.kvtransfer.endpoint import KvEndpoint
    from baton.kvtransfer.links import Link
    from baton.kvtransfer.transports.tcp import TcpTransport

    link, make = KvEndpoint.link, TcpTransport.__init__

    def link_through(self: KvEndpoint, address: tuple[str, int]) -> Link:
        return link(self, exchange.through(address, "page control"))

    def make_through(self: TcpTransport, address: tuple[str, int], *rest: Any, **named: Any) -> None:
        make(self, exchange.through(address, "page data"), *rest, **named)

    KvEndpoint.link = link_through  # type: ignore[method-assign]
    TcpTransport.__init__ = make_through  # type: ignore[method-assign]


def main() -> int:
    port, run = int(sys.argv[1]), process.run

    def run_switched(given: Assignment, *rest: Any, **named: Any) -> None:
        _switch(Exchange(given.name, port), given.kind)
        run(given, *rest, **named)

    process.run = run_switched
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
