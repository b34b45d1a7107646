"""The gateway's routes.

Frequent requests go to plain ASGI applications; FastAPI serves the others.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

import baton
from baton.config.gateway import GatewayConfig
from baton.errors import BatonError
from baton.gateway.api.admin import Canary, Find, add_admin_routes
from baton.gateway.api.body import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from baton.gateway.api.body_reader import ServedModel, ServedModels
from baton.gateway.api.dialects.messages import CountBody, MessageBody, body_of_error
from baton.gateway.api.dialects.responses import ResponsesBody
from baton.gateway.api.errors import ApiError, as_api_error
from baton.gateway.http.api_page import HEADERS as API_PAGE_HEADERS
from baton.gateway.http.api_page import api_page
from baton.gateway.http.auth import AuthMiddleware
from baton.gateway.metrics.dashboard import LiveFeed, add_dashboard_routes
from baton.gateway.metrics.exporter import Exporter
from baton.gateway.metrics.tracing import Tracer
from baton.gateway.tenants.tenants import Tenants

# Routes that are no FastAPI functions, for `/openapi.json`.
POSTS: Final[dict[str, tuple[type[msgspec.Struct], str]]] = {
    "/v1/chat/completions": (ChatBody, "The next turn of a chat, whole or as server-sent events."),
    "/v1/completions": (CompletionBody, "The continuation of a prompt, whole or as server-sent events."),
    "/v1/responses": (ResponsesBody, "The next turn of a conversation, in the form of OpenAI's Responses."),
    "/v1/messages": (MessageBody, "The next turn of a chat, in Anthropic's form."),
    "/v1/messages/count_tokens": (CountBody, "The number of tokens of a chat in Anthropic's form."),
    "/tokenize": (TokenizeBody, "Text, or a chat, as token ids."),
    "/detokenize": (DetokenizeBody, "Token ids as text."),
}
# Routes of vLLM for tasks that no model has here.
OTHER_TASKS: Final = (
    *("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"),
    *("/pooling", "/classify", "/v1/audio/transcriptions", "/v1/audio/translations"),
)
STATUSES: Final = {
    "200": "The answer",
    "400": "The request must change",
    "401": "The key is missing or unknown",
    "403": "The key may not use the model",
    "404": "There is no such model",
    "408": "The request did not arrive in time",
    "413": "The body is too large",
    "429": "A quota is used up, or an objective cannot be kept",
    "431": "The headers are too large",
    "500": "A worker failed",
    "503": "There is no room now; retry-after says when to retry",
    "504": "The deadline passed before the first token",
}
REFERENCE: Final = "#/components/schemas/{name}"


def describe_routes(openapi: dict[str, Any]) -> None:
    """Add the routes of POSTS to an OpenAPI document."""
    bodies = [body for body, _ in POSTS.values()]
    references, schemas = msgspec.json.schema_components(
        bodies, schema_hook=lambda kind: {"description": "any value"}, ref_template=REFERENCE
    )
    openapi.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    responses = {status: {"description": text} for status, text in STATUSES.items()}
    for (path, (_, summary)), reference in zip(POSTS.items(), references, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": reference}}}
        openapi["paths"][path] = {"post": {"summary": summary, "requestBody": body, "responses": responses}}


EXPOSED_HEADERS: Final = ("x-request-id", "traceparent", "retry-after", "retry-after-ms", "x-should-retry")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
JSON = "application/json"


def make_app(
    models: ServedModels,
    tenants: Tenants,
    *,
    posts: Mapping[str, ASGIApp],
    websocket: Callable[[WebSocket], Awaitable[None]],
    canaries: Sequence[Canary],
    exporter: Exporter,
    feed: LiveFeed,
    config: GatewayConfig,
    find: Find,
    tracer: Tracer | None,
    routes: Iterable[Callable[[FastAPI], None]],
) -> ASGIApp:
    """Return the whole gateway as one ASGI application.

    canaries: one for each model, in order. posts: by path. websocket: answers `/v1/stream`. find: of the
    requests of this gateway. routes: each adds routes of one part.
    """
    app = FastAPI(
        title="Baton",
        version=baton.__version__,
        redirect_slashes=False,
        docs_url=None,  # it loads scripts from elsewhere: see gateway/http/api_page.py
        redoc_url=None,
    )
    # The middleware sends a POST to its application directly; these routes refuse other methods.
    app.router.routes += [Route(path, _never, methods=["POST"]) for path in posts]
    app.router.routes += [Route(path, _refuse_task, methods=["GET", "POST"]) for path in OTHER_TASKS]
    app.router.routes.append(WebSocketRoute("/v1/stream", websocket))
    service = models.first.service
    _add_health(app, models, canaries)
    _add_operator_pages(app, exporter)
    add_dashboard_routes(app, feed, service)
    _add_models(app, models)
    add_admin_routes(app, service, find)
    for add_routes in routes:
        add_routes(app)
    _answer_errors(app)
    _add_api_page(app)
    describe_routes(app.openapi())  # made once and kept until another route is added
    guarded = AuthMiddleware(
        app,
        tenants,
        posts=posts,
        answered=exporter.metrics.answered,
        operator_port=config.operator_port,
        allowed_origins=config.allowed_origins,
        begin_trace=None if tracer is None else tracer.context,
    )
    return _with_cors(guarded, config.allowed_origins) if config.allowed_origins else guarded


def _with_cors(app: ASGIApp, allowed_origins: Sequence[str]) -> ASGIApp:
    """Let pages of these sites use the API, as in vLLM.

    Browsers ask before a request, without a key: this is answered before keys are checked.
    """
    return CORSMiddleware(
        app,
        allow_origins=allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
    )


async def _refuse_task(request: Request) -> Response:
    served = "/v1/chat/completions, /v1/completions, /v1/responses and /v1/messages"
    raise ApiError(
        404, f"this server generates text, and has no other task: it has {served}", code="not_found"
    )


async def _never(request: Request) -> Response:
    raise ApiError(404, "there is no such path", code="not_found")


def _add_health(app: FastAPI, models: ServedModels, canaries: Sequence[Canary]) -> None:
    @app.get("/ping")
    async def ping() -> Response:
        """Answer while this process runs, with or without workers."""
        return Response(b"{}", media_type=JSON)

    @app.get("/health")
    async def health() -> Response:
        """Answer when a request has just gone through the workers, prefill included where configured."""
        asleep = [model.name for model in models if model.is_asleep]
        for canary, served in zip(canaries, models, strict=True):
            if served.is_changing:
                continue  # a check proves nothing then, and might wake the model
            try:
                await canary.check()
            except BatonError as error:
                which = f"model {canary.model!r}: " if canary.model else ""
                message = f"not healthy: {which}{error}"
                raise ApiError(503, message, code="unhealthy", retry_after_s=1.0) from error
        said: dict[str, object] = {"status": "ok", "model": models.first.name}
        if len(canaries) > 1:
            said["models"] = models.names
        if asleep:
            said["asleep"] = asleep
        status = models.first.service.status
        if status is not None and status.head_away_s:
            said["warnings"] = [
                f"Ray's head has not answered for {status.head_away_s:.0f} s: no worker can be started"
            ]
        return Response(orjson.dumps(said), media_type=JSON)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": app.version}


def _add_api_page(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """Show the routes and their bodies on one page."""
        return Response(api_page(app.openapi()), media_type="text/html", headers=API_PAGE_HEADERS)


def _add_operator_pages(app: FastAPI, exporter: Exporter) -> None:
    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics of every gateway behind the port in Prometheus' text format."""
        text = exporter.text(await exporter.gateways())
        return Response(text, headers={"content-type": METRICS_TYPE})

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Return the number of calls that are being answered behind the port."""
        return {"server_load": sum(counts.num_open for counts in await exporter.gateways())}


def _add_models(app: FastAPI, models: ServedModels) -> None:
    @app.get("/v1/models")
    async def all_models(request: Request) -> dict[str, Any]:
        """List the models that the key may use."""
        may_use = request.state.tenant.may_use
        named = ((model, name) for model in models for name in (model.name, *model.adapters))
        return {"object": "list", "data": [_card(model, name) for model, name in named if may_use(name)]}

    @app.get("/v1/models/{name:path}", responses={404: {"description": "There is no such model"}})
    async def one_model(name: str, request: Request) -> dict[str, Any]:
        model = models.of(name)
        model.read_policy(request.state.tenant).check_model(name)
        return _card(model, name)


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    tokenizer, adapter = model.bodies.reader.tokenizer, model.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": model.created_s if adapter is None else adapter.created_s,
        "owned_by": "baton",
        "root": name if adapter is None else adapter.adapter.path,
        "parent": None if adapter is None else model.name,
        "max_model_len": model.max_model_len,
        "vocab_size": None if tokenizer is None else tokenizer.vocab_size,
    }


def _answer_errors(app: FastAPI) -> None:
    """Answer every error in the shape of the API that was called."""

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        message = {404: "there is no such path", 405: "this path takes another method"}.get(
            error.status_code, "the request cannot be served"
        )
        code = "not_found" if error.status_code == 404 else "method_not_allowed"
        response = _response(request, ApiError(error.status_code, message, code=code))
        response.headers.update(error.headers or {})  # such as the methods that are allowed
        return response

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _response(request, as_api_error(error))  # the middleware gets it next, and logs it


def _response(request: Request, error: ApiError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    body = body_of_error(request.url.path, error, request.state.request_id)
    return Response(body, status_code=error.status, media_type=JSON, headers=headers)
