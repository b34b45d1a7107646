"""The gateway's routes, and what is put together to serve them.

What clients send by the thousand goes to plain ASGI applications; the few others are FastAPI's.
"""

from typing import Any, Final

import msgspec
import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp

import baton
from baton.errors import BatonError
from baton.gateway.api.admin import Canary, Explain, add_admin_routes
from baton.gateway.api.errors import ApiError, as_api_error
from baton.gateway.api.inference import Inference, TextRoutes
from baton.gateway.api.stream_socket import StreamSocket
from baton.gateway.api.types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from baton.gateway.http.auth import AuthMiddleware, log_failure
from baton.gateway.metrics import dashboard
from baton.gateway.metrics.dashboard import Dashboard
from baton.gateway.metrics.exporter import Exporter
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.tenants.tenants import Tenants
from baton.gateway.text.work import ServedModel

# How `/openapi.json` describes the routes that are no FastAPI functions.

ROUTES: Final[dict[str, tuple[type[msgspec.Struct], str]]] = {
    "/v1/chat/completions": (ChatBody, "The next turn of a chat, whole or as server-sent events."),
    "/v1/completions": (CompletionBody, "What follows a prompt, whole or as server-sent events."),
    "/tokenize": (TokenizeBody, "Text, or a chat, as token ids."),
    "/detokenize": (DetokenizeBody, "Token ids as text."),
}
STATUSES: Final = {
    "200": "The answer",
    "400": "The request must change",
    "401": "No known key came along",
    "403": "The key may not use the model",
    "404": "There is no such model",
    "408": "The request did not arrive in time",
    "413": "The body is too large",
    "431": "The headers are too large",
    "500": "A worker failed",
    "503": "There is no room now; retry-after says when to ask again",
}
REFERENCE: Final = "#/components/schemas/{name}"


def describe_routes(openapi: dict[str, Any]) -> None:
    """Add the routes above to a document."""
    bodies = [body for body, _ in ROUTES.values()]
    references, schemas = msgspec.json.schema_components(
        bodies, schema_hook=_any_value, ref_template=REFERENCE
    )
    openapi.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    responses = {status: {"description": text} for status, text in STATUSES.items()}
    for (path, (_, summary)), reference in zip(ROUTES.items(), references, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": reference}}}
        openapi["paths"][path] = {"post": {"summary": summary, "requestBody": body, "responses": responses}}


def _any_value(kind: type) -> dict[str, Any]:
    return {"description": "any value"}


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
JSON = "application/json"


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What the routes work with."""

    model: ServedModel
    inference: Inference
    text_routes: TextRoutes
    stream_socket: StreamSocket
    canary: Canary
    metrics: Metrics
    exporter: Exporter
    dashboard: Dashboard
    tenants: Tenants
    operator_port: int | None
    explain: Explain | None = None  # the router's decisions to whoever asks; None: to nobody


def make_app(parts: Parts) -> ASGIApp:
    """The whole gateway, as one ASGI application."""
    app = FastAPI(
        title="Baton",
        version=baton.__version__,
        redirect_slashes=False,
        docs_url=None,  # it loads scripts from elsewhere
        redoc_url=None,
    )
    posts: dict[str, ASGIApp] = {
        "/v1/chat/completions": parts.inference.chat,
        "/v1/completions": parts.inference.completions,
        "/tokenize": parts.text_routes.tokenize,
        "/detokenize": parts.text_routes.detokenize,
    }
    # The Gate sends POSTs there directly; here they are for what comes with another method.
    app.router.routes += [Route(path, _never, methods=["POST"]) for path in posts]
    app.router.routes.append(WebSocketRoute("/v1/stream", parts.stream_socket.serve))
    _add_status_routes(app, parts)
    if parts.explain is not None:
        add_admin_routes(app, parts.explain)
    _answer_errors(app)
    describe_routes(app.openapi())  # it is made once, and kept
    return AuthMiddleware(
        app,
        parts.tenants,
        posts=posts,
        answered=parts.metrics.answered,
        operator_port=parts.operator_port,
    )


async def _never(request: Request) -> Response:
    raise ApiError(404, "there is no such path", code="not_found")


def _add_status_routes(app: FastAPI, parts: Parts) -> None:
    @app.get("/ping")
    async def ping() -> Response:
        """This process runs its loop; nothing is said of workers."""
        return Response(b"{}", media_type=JSON)

    @app.get("/health")
    async def health() -> Response:
        """A request has just gone through a decode worker, and a prefill worker where there should be any."""
        try:
            await parts.canary.sing()
        except BatonError as error:
            raise ApiError(503, f"not healthy: {error}", code="unhealthy", retry_after_s=1.0) from error
        said: dict[str, object] = {"status": "ok", "model": parts.model.name}
        status = parts.model.service.status
        if status is not None and status.head_away_s:
            said["warnings"] = [
                f"Ray's head has not answered for {status.head_away_s:.0f} s: no worker can be started"
            ]
        return Response(orjson.dumps(said), media_type=JSON)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": app.version}

    @app.get("/metrics")
    async def metrics() -> Response:
        """In Prometheus' text format, of every gateway behind the port."""
        return Response(await parts.exporter.scraped(), headers={"content-type": METRICS_TYPE})

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Calls that are being answered behind the port."""
        return {"server_load": sum(counts.num_open for counts in await parts.exporter.counts())}

    @app.get("/ui", include_in_schema=False)
    async def ui() -> Response:
        """The cluster on one page."""
        page = parts.dashboard.page(await parts.exporter.counts(), parts.model.service.status)
        return Response(page, media_type="text/html", headers=dashboard.HEADERS)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """Those that the key may use."""
        may_use = request.state.tenant.may_use(parts.model.name)
        return {"object": "list", "data": [_card(parts.model)] if may_use else []}

    @app.get("/v1/models/{name:path}", responses={404: {"description": "There is no such model"}})
    async def model(name: str, request: Request) -> dict[str, Any]:
        parts.model.check(name, request.state.tenant)
        return _card(parts.model)


def _card(model: ServedModel) -> dict[str, Any]:
    lengths = [worker.max_model_len for worker in model.service.workers]
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "baton",
        "root": model.name,
        "parent": None,
        "max_model_len": min(lengths, default=None),
        "vocab_size": model.text.tokenizer.vocab_size if model.text.has_tokenizer else None,
    }


def _answer_errors(app: FastAPI) -> None:
    """Everything in OpenAI's shape."""

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        message = {404: "there is no such path", 405: "this path takes another method"}.get(
            error.status_code, "the request cannot be served"
        )
        code = "not_found" if error.status_code == 404 else "method_not_allowed"
        response = _response(ApiError(error.status_code, message, code=code))
        response.headers.update(error.headers or {})  # such as the methods that are allowed
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _response(ApiError(400, "the request's parameters are not valid", code="invalid_value"))

    @app.exception_handler(BatonError)
    async def failed(request: Request, error: BatonError) -> Response:
        answer = as_api_error(error)
        if answer.status >= 500:
            log_failure(error, request.state.request_id)
        return _response(answer)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return _response(as_api_error(error))  # and then it goes on to the Gate


def _response(error: ApiError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), status_code=error.status, media_type=JSON, headers=headers)
