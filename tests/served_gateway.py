"""A gateway on a real socket, on a thread of its own, over any Service."""

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from baton.clock import SystemClock
from baton.cluster.model_directory import resolve_model
from baton.config.gateway import GatewayConfig
from baton.gateway.process import GatewayProcess
from baton.gateway.streams.request_stream import Service
from baton.messages.workers import Address
from tests.http_calls import HttpCalls

KEY = b"k" * 32
NOWHERE = Address("127.0.0.1", 1)  # no router is asked
TIMEOUT_S = 60.0

ServiceT = TypeVar("ServiceT", bound=Service)
ResultT = TypeVar("ResultT")


class ServedGateway(HttpCalls, Generic[ServiceT]):
    """A context manager. `make_service` and all calls of the service run on the gateway's loop."""

    def __init__(self, make_service: Callable[[], ServiceT], **settings: Any) -> None:
        self._make_service = make_service
        self._config = GatewayConfig(
            **{
                "model": str(resolve_model("tiny")),
                "served_model_name": "tiny",
                "routers": (NOWHERE,),
                "port": 0,
                "drain_timeout_s": 1.0,
                **settings,
            }
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway")

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.address = self._wait(asyncio.run_coroutine_threadsafe(self._start(), self._loop))
        except BaseException:
            self._end_thread()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wait(asyncio.run_coroutine_threadsafe(self.gateway.drain(), self._loop))
        self._end_thread()

    @property
    def url(self) -> str:
        return f"http://{self.address.host}:{self.address.port}"

    def on_loop(self, act: Callable[[], ResultT]) -> ResultT:
        """Call `act` on the gateway's thread and return its result."""

        async def run() -> ResultT:
            return act()

        return self._wait(asyncio.run_coroutine_threadsafe(run(), self._loop))

    def until(self, holds: Callable[[], bool]) -> None:
        """Return once `holds` is true on the gateway's thread."""

        async def watch() -> None:
            while not holds():
                await asyncio.sleep(0.001)

        self._wait(asyncio.run_coroutine_threadsafe(watch(), self._loop))

    def begin_drain(self) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(self.gateway.drain(), self._loop)

    def connect(self) -> socket.socket:
        """A client's socket, which gives up reading after a while."""
        return socket.create_connection((self.address.host, self.address.port), timeout=TIMEOUT_S)

    async def _start(self) -> Address:
        self.service = self._make_service()
        self.gateway = GatewayProcess(self._config, KEY, self.service, SystemClock())
        return await self.gateway.start()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @staticmethod
    def _wait(future: "Future[ResultT]") -> ResultT:
        return future.result(timeout=TIMEOUT_S)
