"""The first to see every request: gives it an id, lets in who may come in, answers what goes wrong.

Whoever has no key sees `/health` and `/ping` and nothing else; a path is what the server parsed from the
request line, never what a Host header makes of it.
"""

import logging
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.gateway.api_errors import ApiError, ClientGone, as_api_error
from baton.gateway.asgi import header, respond_error
from baton.gateway.tenants import Tenant, Tenants
from baton.gateway_config import is_loopback

PUBLIC_PATHS: Final = frozenset({"/health", "/ping"})
LABEL: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # a client's own id: shown, and nothing is read from it
BEARER: Final = "bearer "
POLICY_VIOLATION: Final = 1008
SWITCHED: Final = 101  # the status of a request that became a WebSocket

logger = logging.getLogger(__name__)


class Gate:
    def __init__(
        self,
        app: ASGIApp,
        tenants: Tenants,
        *,
        posts: Mapping[str, ASGIApp],
        answered: Callable[[str, int], None],
    ) -> None:
        """posts: by path, what a POST is sent to at once, where `app` would go through all of its layers.
        `answered(path, status)` is called once for each request.
        """
        self._app = app
        self._posts = posts
        self._tenants = tenants
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._serve_websocket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        label = _label(scope)
        scope["state"]["request_id"] = label
        status = 499  # nobody has heard an answer

        async def send_labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", label.encode())]
            await send(message)

        try:
            scope["state"]["tenant"] = self._tenant(scope)
            app = self._posts.get(scope["path"], self._app) if scope["method"] == "POST" else self._app
            await app(scope, receive, send_labelled)
        except ClientGone:
            pass  # there is no one to tell; the status above is in the metrics
        except Exception as error:
            answer = as_api_error(error)
            if answer.status >= 500:
                log_failure(error, label)
            if status == 499:
                await respond_error(send_labelled, answer)
        finally:
            self._answered(scope["path"], status)

    async def _serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["request_id"] = _label(scope)
        try:
            scope["state"]["tenant"] = self._tenant(scope)
        except ApiError as error:
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": str(error)})
            self._answered(scope["path"], error.status)
            return
        await self._app(scope, receive, send)
        self._answered(scope["path"], SWITCHED)

    def _tenant(self, scope: Scope) -> Tenant | None:
        """None on a public path, whatever key comes along. Raises ApiError 401, and 403."""
        if not self._tenants.need_keys:
            _check_origin(scope)
        if scope["path"] in PUBLIC_PATHS:
            return None
        given = header(scope, b"authorization")
        key = given[len(BEARER) :] if given and given.lower().startswith(BEARER) else None
        if key is None and self._tenants.need_keys:
            raise ApiError(
                401,
                "an API key is needed: send the header 'Authorization: Bearer KEY'",
                code="missing_api_key",
            )
        tenant = self._tenants.find(key or "")
        if tenant is None:
            raise ApiError(401, "the API key is not known", code="invalid_api_key")
        return tenant


def log_failure(error: Exception, request_id: str) -> None:
    """Of a status of 500 and more. What is no bug of ours takes no more than a line."""
    if as_api_error(error).status == 503:
        logger.info("request %s found no room: %s", request_id, error)
    else:
        logger.error("request %s failed: %s", request_id, error, exc_info=error)


def _label(scope: Scope) -> str:
    given = header(scope, b"x-request-id")
    return given if given is not None and LABEL.fullmatch(given) else f"req-{secrets.token_hex(16)}"


def _check_origin(scope: Scope) -> None:
    """Where no key is needed, pages of other sites must not use what listens on this machine.

    A browser says which site a page is of. A name that its owner has made to mean 127.0.0.1 is not ours.
    """
    origin = header(scope, b"origin")
    if origin is None:
        return
    host = header(scope, b"host") or ""
    if origin.partition("://")[2] != host or not is_loopback(_hostname(host)):
        raise ApiError(403, "pages of other sites may not use this server", code="origin")


def _hostname(host: str) -> str:
    """Of a Host header: without the port, and the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
