import pytest
from starlette.types import Message, Receive, Scope, Send

from baton.gateway.http.auth import SWITCHED, AuthMiddleware
from baton.gateway.tenants.tenants import Tenants
from tests.event_loop import on_loop


async def receive() -> Message:
    return {"type": "websocket.connect"}


async def send(message: Message) -> None:
    pass


@on_loop
async def test_websocket_is_counted_once_when_its_application_fails() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError

    answered: list[tuple[str, int]] = []
    middleware = AuthMiddleware(
        fail, Tenants(b"k" * 32), posts={}, answered=lambda path, status: answered.append((path, status))
    )
    scope = {"type": "websocket", "path": "/v1/stream", "headers": [], "server": ("x", 1), "state": {}}
    with pytest.raises(ZeroDivisionError):
        await middleware(scope, receive, send)
    assert answered == [("/v1/stream", SWITCHED)]
