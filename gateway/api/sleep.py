"""`/sleep`, `/wake_up` and `/is_sleeping` of vLLM; with `?model=NAME` where there are several models.

1. An order gets a number, and goes to all routers and from there to the workers of the model. It is repeated
   every ASK_EVERY_S, because a router may be lost or may join.
2. The answer comes when every worker of the model sleeps, or serves again.
3. The order with the highest number holds, regardless of its gateway. A call that waits gets 409 when the
   opposite is ordered. A new order gets a higher number than all orders that the gateway knows of.

gateway/http/auth.py admits operators alone.
"""

import asyncio
import time
from typing import Final, Literal

import msgspec
from fastapi import FastAPI, Request, Response

from baton.gateway.api.body import read_query
from baton.gateway.api.body_reader import OpenOrder, ServedModel, ServedModels
from baton.gateway.api.errors import ApiError, invalid
from baton.messages.orders import Sleep, Wake, is_superseded, latest_order, not_followed, numbered

ASK_EVERY_S: Final = 1.0
LOOK_EVERY_S: Final = 0.05
TIMEOUT_S: Final = 600.0  # for running requests to end, or for the model to be loaded


class ModelQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of `/wake_up` and `/is_sleeping`."""

    model: str | None = None


class SleepQuery(ModelQuery, frozen=True, forbid_unknown_fields=True):
    """The parameters of `/sleep`."""

    level: Literal[1, 2] = 1


def add_sleep_routes(app: FastAPI, models: ServedModels) -> None:
    """Add the routes; each takes the parameters that vLLM's takes, and `model`."""

    @app.post("/sleep")
    async def sleep(request: Request) -> Response:
        """Let running requests end, then free the weights and the KV pages of a model."""
        asked = read_query(request.query_params, SleepQuery)
        model = _model(models, asked.model)
        await _repeat_order(model, Sleep(model=model.key, level=asked.level))
        return Response()

    @app.post("/wake_up")
    async def wake_up(request: Request) -> Response:
        """Load a model that sleeps, and serve it again."""
        model = _model(models, read_query(request.query_params, ModelQuery).model)
        await _repeat_order(model, Wake(model=model.key))
        return Response()

    @app.get("/is_sleeping")
    async def is_sleeping(request: Request) -> dict[str, bool]:
        """Tell whether a model sleeps."""
        asked = read_query(request.query_params, ModelQuery)
        return {"is_sleeping": _model(models, asked.model).view.is_asleep}


def _model(models: ServedModels, name: str | None) -> ServedModel:
    """Return the model that a call is about. Raises ApiError 400 and 404."""
    names = ", ".join(map(repr, models.names))
    if name is None and len(models.names) > 1:
        raise invalid("model", f"name one of {names}")
    if name is not None and name not in models.names:
        message = f"the model {name[:80]!r} does not exist; there are {names}"
        raise ApiError(404, message, code="model_not_found", param="model")
    return models.of(name)


async def _repeat_order(model: ServedModel, asked: Sleep | Wake) -> None:
    """Give an order until all workers of the model have followed.

    Raises ApiError 409 when a later order to do the opposite holds, and 503 after TIMEOUT_S.
    """
    order, former = numbered(asked, model.orders, time.time()), latest_order(model.orders, model.key)
    workers = frozenset(worker.name for worker in model.view.workers)
    if model.open_order is not None:
        workers |= model.open_order.workers
    if not workers:
        raise ApiError(503, "no worker has joined yet", code="no_worker", retry_after_s=ASK_EVERY_S)
    model.open_order = opened = OpenOrder(order, workers)
    loop = asyncio.get_running_loop()
    ask_s = look_s = began_s = loop.time()
    if former is not None and type(former) is not type(order):
        look_s += ASK_EVERY_S  # workers may follow that order without having reported it
    try:
        while (now_s := loop.time()) < look_s or not _have_followed(model, opened):
            if is_superseded(order, model.orders):
                reason = f"the opposite was ordered of {model.name!r} meanwhile"
                raise ApiError(409, reason, code="superseded")
            if now_s - began_s > TIMEOUT_S:
                reason = f"the workers of {model.name!r} have not followed within {TIMEOUT_S:g} s"
                raise ApiError(503, reason, code="not_done", retry_after_s=ASK_EVERY_S)
            if now_s >= ask_s:
                model.service.send_order(order)
                ask_s = now_s + ASK_EVERY_S
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        if model.open_order is opened:
            model.open_order = None


def _have_followed(model: ServedModel, opened: OpenOrder) -> bool:
    """Return whether all workers of the order have followed."""
    return not not_followed(opened.order, opened.workers, model.view.workers, model.service.draining)
