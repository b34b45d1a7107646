"""`/sleep`, `/wake_up` and `/is_sleeping` of vLLM; with `?model=NAME` where there are several models.

1. An order goes to a router, and from there to the workers of the model. It is repeated every ASK_EVERY_S: a
   worker that falls asleep hears no order to wake, and a router may be lost.
2. The answer comes when every worker of the model sleeps, or serves again.
3. The latest order holds: a call that waits gets 409 when the opposite is ordered.

gateway/http/auth.py admits operators alone.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from fastapi import FastAPI, Request, Response

from baton.gateway.api.body_reader import OpenOrder, ServedModel, ServedModels
from baton.gateway.api.errors import ApiError, invalid
from baton.messages.operations import Sleep, Wake

ASK_EVERY_S: Final = 1.0
LOOK_EVERY_S: Final = 0.05
TIMEOUT_S: Final = 600.0  # for running requests to end, or for the model to be loaded
LEVELS: Final = {"1": 1, "2": 2}


def add_sleep_routes(app: FastAPI, models: ServedModels) -> None:
    """Add the routes; each takes the parameters that vLLM's takes, and `model`."""

    @app.post("/sleep")
    async def sleep(request: Request) -> Response:
        """Let running requests end, then free the weights and the KV pages of a model."""
        params = request.query_params
        model, level = _model(models, params, "level"), LEVELS.get(params.get("level", "1"))
        if level is None:
            raise invalid("level: expected 1 or 2", param="level")
        await _order(model, Sleep(model=model.key, level=level), are_asleep=True)
        return Response()

    @app.post("/wake_up")
    async def wake_up(request: Request) -> Response:
        """Load a model that sleeps, and serve it again."""
        model = _model(models, request.query_params)
        await _order(model, Wake(model=model.key), are_asleep=False)
        return Response()

    @app.get("/is_sleeping")
    async def is_sleeping(request: Request) -> dict[str, bool]:
        """Tell whether a model sleeps."""
        return {"is_sleeping": _model(models, request.query_params).is_asleep}


def _model(models: ServedModels, params: Mapping[str, str], *others: str) -> ServedModel:
    """Return the model that a call is about. Raises ApiError 400 and 404."""
    for key in params:
        if key not in ("model", *others):
            raise invalid(f"the query parameter {key[:40]!r} is not known", param=key[:40])
    name = params.get("model")
    names = ", ".join(map(repr, models.names))
    if name is None and len(models.names) > 1:
        raise invalid(f"model: name one of {names}", param="model")
    if name is not None and name not in models.names:
        message = f"the model {name[:80]!r} does not exist; there are {names}"
        raise ApiError(404, message, code="model_not_found", param="model")
    return models.of(name)


async def _order(model: ServedModel, message: Sleep | Wake, *, are_asleep: bool) -> None:
    """Give an order until all workers of the model sleep, or all serve.

    Raises ApiError 409 when the opposite is ordered meanwhile, and 503 after TIMEOUT_S.
    """
    former = model.order
    order = OpenOrder(are_asleep, frozenset(worker.name for worker in model.workers))
    if former is not None:
        order = OpenOrder(are_asleep, order.workers | former.workers)
    if not order.workers:
        raise ApiError(503, "no worker has joined yet", code="no_worker", retry_after_s=ASK_EVERY_S)
    model.order = order
    loop = asyncio.get_running_loop()
    ask_s = look_s = began_s = loop.time()
    if former is not None and former.are_asleep is not are_asleep:
        look_s += ASK_EVERY_S  # workers may begin to follow that order, and have not said so
    try:
        while (now_s := loop.time()) < look_s or not _have_followed(model, order):
            if model.order is not None and model.order.are_asleep is not are_asleep:
                reason = f"the opposite was ordered of {model.name!r} meanwhile"
                raise ApiError(409, reason, code="superseded")
            if now_s - began_s > TIMEOUT_S:
                reason = f"the workers of {model.name!r} have not followed within {TIMEOUT_S:g} s"
                raise ApiError(503, reason, code="not_done", retry_after_s=ASK_EVERY_S)
            if now_s >= ask_s:
                model.service.order(message)
                ask_s = now_s + ASK_EVERY_S
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        if model.order is order:
            model.order = None


def _have_followed(model: ServedModel, order: OpenOrder) -> bool:
    """Return whether all workers of the order sleep; or serve, and will not fall asleep."""
    draining = () if order.are_asleep else model.service.draining
    following = (each for each in model.workers if each.is_asleep is order.are_asleep)
    return order.workers <= {each.name for each in following if each.id not in draining}
