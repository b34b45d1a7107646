"""Auth middleware: gives every request an id, checks its key, and answers errors.

| path | port for clients, with tenants | port for operators |
|---|---|---|
| `/health`, `/ping` | no key | no key |
| those in OPERATORS_PATHS, `/ui/...`, `/admin/...` | the key of a tenant with `admin: true` | no key |
| all others | the key of a tenant | as on the port for clients |

The caller's address and headers decide nothing: a proxy on this machine connects from 127.0.0.1 for remote
callers, and may add or drop headers. Without tenants both ports are open, and on loopback. The path is the
one that the server parsed from the request line; a Host header cannot change it.

Without keys the middleware refuses pages of other sites. A page in a browser of this machine can send
requests to every port of 127.0.0.1. The browser names the page's site in Origin, though not with every GET,
and the requested name in Host. The Host check also stops DNS rebinding, where a foreign name resolves to
127.0.0.1.
"""

import re
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeAlias

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.config.gateway import OPERATOR_HOST, is_loopback
from baton.gateway.api.dialects.messages import body_of_error
from baton.gateway.api.errors import ApiError, ClientGone, Headers, answer_to
from baton.gateway.http.protocol import header, respond
from baton.gateway.metrics.tracing import TRACE, TraceContext
from baton.gateway.tenants.tenants import Tenant, Tenants

PUBLIC_PATHS: Final = frozenset({"/health", "/ping"})
# They show the requests of all tenants, or change the models.
OPERATORS_PATHS: Final = frozenset(
    {"/metrics", "/load", "/ui", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    | {"/sleep", "/wake_up", "/is_sleeping"}
)
OPERATORS_FOLDERS: Final = ("/admin/", "/ui/")  # every path below is for operators too
LABEL: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # a client's own id: only shown
BEARER: Final = "bearer "
POLICY_VIOLATION: Final = 1008
SWITCHED: Final = 101  # the status of a request that became a WebSocket
UNANSWERED: Final = 499  # the client left before an answer
# Of the headers traceparent and tracestate.
BeginTrace: TypeAlias = Callable[[str | None, str | None], TraceContext]


def check_site(scope: Scope, allowed_origins: Collection[str] = ()) -> None:
    """Check a request to a loopback listener that needs no key. Raises ApiError 403.

    allowed_origins: sites of which pages may use the API; "*" is every site.
    """
    host, origin = header(scope, b"host"), header(scope, b"origin")
    if host is not None and not is_loopback(_hostname(host)):
        raise ApiError(
            403,
            "without keys only this machine's own names are served, such as localhost and 127.0.0.1: "
            "send one of them as Host, or start the server with --tenants",
            code="host",
        )
    is_foreign = origin is not None and origin.partition("://")[2] != (host or "")
    if is_foreign and not {origin, "*"} & set(allowed_origins):
        message = "pages of other sites may not use this server; --allowed-origins names sites that may"
        raise ApiError(403, message, code="origin")


def _hostname(host: str) -> str:
    """Return the name in a Host header, without the port and the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


class AuthMiddleware:
    """The outermost ASGI application of a gateway."""

    def __init__(
        self,
        app: ASGIApp,
        tenants: Tenants,
        *,
        posts: Mapping[str, ASGIApp],
        answered: Callable[[str, int], None],
        operator_port: int | None = None,
        allowed_origins: Collection[str] = (),
        begin_trace: BeginTrace | None = None,
    ) -> None:
        """posts: by path, the applications that get a POST directly, past the layers of `app`.

        answered: called once for each request, with its path and status. operator_port, allowed_origins: see
        GatewayConfig.
        begin_trace: gives each call a trace; None: there are no traces.
        """
        self._operator_port = operator_port
        self._allowed_origins = frozenset(allowed_origins)
        self._app = app
        self._posts = posts
        self._tenants = tenants
        self._answered = answered
        self._begin_trace = begin_trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._serve_websocket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        label = self._label(scope)
        scope["state"]["request_id"] = label
        status = UNANSWERED
        trace = self._trace(scope)

        async def send_labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", label.encode()), *trace]
            await send(message)

        try:
            scope["state"]["tenant"] = self._tenant(scope)
            app = self._posts.get(scope["path"], self._app) if scope["method"] == "POST" else self._app
            await app(scope, receive, send_labelled)
        except ClientGone:
            pass  # the metrics have the status
        except Exception as error:
            answer = answer_to(error, label)
            if status == UNANSWERED:
                body = body_of_error(scope["path"], answer, label)
                await respond(send_labelled, answer.status, body, answer.headers())
        finally:
            self._answered(scope["path"], status)

    def _label(self, scope: Scope) -> str:
        """Return the id of a request, which the client may give."""
        given = header(scope, b"x-request-id")
        return given if given is not None and LABEL.fullmatch(given) else f"req-{secrets.token_hex(16)}"

    def _trace(self, scope: Scope) -> Headers:
        """Begin or continue a trace for a call, if there are traces; return the headers of its answer."""
        if self._begin_trace is None or scope["path"] not in self._posts:
            return []
        trace = self._begin_trace(header(scope, b"traceparent"), header(scope, b"tracestate"))
        scope["state"][TRACE] = trace
        return [(b"traceparent", trace.header.encode())]

    async def _serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["request_id"] = self._label(scope)
        try:
            scope["state"]["tenant"] = self._tenant(scope)
        except ApiError as error:
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": str(error)})
            self._answered(scope["path"], error.status)
            return
        try:
            await self._app(scope, self._checking(scope, receive, send), send)
        finally:
            self._answered(scope["path"], SWITCHED)

    def _checking(self, scope: Scope, receive: Receive, send: Send) -> Receive:
        """Check the key with each message: it may have been revoked since the connection was made."""

        async def receive_checked() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive":
                try:
                    scope["state"]["tenant"] = self._tenant(scope)
                except ApiError as error:
                    await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": str(error)})
                    return {"type": "websocket.disconnect", "code": POLICY_VIOLATION}
            return message

        return receive_checked

    def _tenant(self, scope: Scope) -> Tenant | None:
        """Return the tenant, or None where no key is needed. Raises ApiError 401, 403 and 404."""
        path, need_keys = scope["path"], self._tenants.need_keys
        if not path.isprintable():  # Starlette takes "/metrics\n" for "/metrics"
            raise ApiError(404, "there is no such path", code="not_found")
        is_operators = path in OPERATORS_PATHS or path.startswith(OPERATORS_FOLDERS)
        on_operator_port = scope["server"] == (OPERATOR_HOST, self._operator_port)
        if not need_keys or on_operator_port:
            # The operators' port is only for programs of this machine.
            check_site(scope, () if on_operator_port else self._allowed_origins)
        if path in PUBLIC_PATHS or (is_operators and on_operator_port):
            return None
        given = header(scope, b"authorization")
        key = given[len(BEARER) :] if given and given.lower().startswith(BEARER) else None
        if key is None:
            key = header(scope, b"x-api-key")  # of Anthropic's clients
        if key is None and need_keys:
            raise ApiError(
                401,
                "an API key is needed: send the header 'Authorization: Bearer KEY', or 'x-api-key: KEY'",
                code="missing_api_key",
            )
        tenant = self._tenants.find(key or "")
        if tenant is None:
            raise ApiError(401, "the API key is not known", code="invalid_api_key")
        if is_operators and need_keys and not tenant.is_admin:
            raise ApiError(
                403,
                f"{path} needs the key of a tenant with 'admin: true', or the port of gateway.operator_port",
                code="admin_only",
            )
        return tenant
