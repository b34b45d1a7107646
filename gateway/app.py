"""The gateway's routes.

Frequent requests go to plain ASGI applications; FastAPI serves the others.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

import baton
from baton.config.gateway import GatewayConfig
from baton.gateway.api.body_reader import ServedModel, ServedModels
from baton.gateway.api.dialects.messages import body_of_error
from baton.gateway.api.errors import ApiError, as_api_error
from baton.gateway.api.prompt_reader import BODIES, POSTS
from baton.gateway.http.api_page import HEADERS as API_PAGE_HEADERS
from baton.gateway.http.api_page import api_page
from baton.gateway.http.auth import AuthMiddleware
from baton.gateway.metrics.exporter import Exporter
from baton.gateway.metrics.tracing import Tracer
from baton.gateway.tenants.tenants import Tenants

# Routes of vLLM for tasks that no model has here.
OTHER_TASKS: Final = (
    *("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"),
    *("/pooling", "/classify", "/v1/audio/transcriptions", "/v1/audio/translations"),
)
NO_PATH: Final = "there is no such path; GET /docs lists the paths"
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
    "504": "The first token cannot come by the deadline",
}
REFERENCE: Final = "#/components/schemas/{name}"


def describe_routes(openapi: dict[str, Any]) -> None:
    """Add the routes of POSTS to an OpenAPI document."""
    bodies = [BODIES[kind] for kind, _ in POSTS.values()]
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
    posts: Mapping[str, ASGIApp],
    websocket: Callable[[WebSocket], Awaitable[None]],
    routes: Iterable[Callable[[FastAPI], None]],
) -> FastAPI:
    """Return the application with all routes, which `guard` protects.

    posts: by path. websocket: answers `/v1/stream`. routes: each adds the routes of one part.
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
    for add_routes in routes:
        add_routes(app)
    _answer_errors(app)
    _add_api_page(app)
    describe_routes(app.openapi())  # made once and kept until another route is added
    return app


def guard(
    app: FastAPI,
    tenants: Tenants,
    *,
    posts: Mapping[str, ASGIApp],
    answered: Callable[[str, int], None],
    config: GatewayConfig,
    tracer: Tracer | None,
) -> ASGIApp:
    """Return the application behind the check of keys.

    posts: answered without FastAPI, by path. answered: told the path and the status of each request. Pages of
    the allowed sites may use the API, as in vLLM. Browsers ask before a request, without a key:
    CORSMiddleware answers before keys are checked.
    """
    guarded = AuthMiddleware(
        app,
        tenants,
        posts=posts,
        answered=answered,
        operator_port=config.operator_port,
        allowed_origins=config.allowed_origins,
        begin_trace=None if tracer is None else tracer.context,
    )
    if not config.allowed_origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=config.allowed_origins,
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
    raise ApiError(404, NO_PATH, code="not_found")


def _add_api_page(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """Show the routes and their bodies on one page."""
        return Response(api_page(app.openapi()), media_type="text/html", headers=API_PAGE_HEADERS)


def add_operator_pages(app: FastAPI, exporter: Exporter) -> None:
    """Add `/metrics` and `/load`."""

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics of every gateway behind the port in Prometheus' text format."""
        text = exporter.text(await exporter.gateways())
        return Response(text, headers={"content-type": METRICS_TYPE})

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Return the number of calls that are being answered behind the port."""
        return {"server_load": sum(counts.num_open for counts in await exporter.gateways())}


def add_model_routes(app: FastAPI, models: ServedModels) -> None:
    """Add `/v1/models` and `/v1/models/NAME`."""

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
        "max_model_len": model.view.max_model_len,
        "vocab_size": None if tokenizer is None else tokenizer.vocab_size,
    }


def _answer_errors(app: FastAPI) -> None:
    """Answer every error in the shape of the API that was called."""

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = {404: NO_PATH, 405: f"this path takes {allowed}"}.get(
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
