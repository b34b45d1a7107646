"""Routes for whoever runs the cluster: gate.py lets in nobody else."""

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec
from fastapi import FastAPI

from baton.decision import Decision
from baton.gateway.api_errors import ApiError
from baton.gateway.explanations import Told
from baton.router.decisions import regret_s

ANSWER_TIMEOUT_S: Final = 5.0
_ID: Final = re.compile("[0-9a-f]{32}")

Explain: TypeAlias = Callable[[str, Told], None]


def add_admin_routes(app: FastAPI, explain: Explain) -> None:
    @app.get("/admin/decisions/{request_id}", include_in_schema=False)
    async def decisions(request_id: str) -> dict[str, Any]:
        """How a request was routed, one entry an attempt; by the `id` of its answer."""
        found = await _ask(explain, request_id.rpartition("-")[2])
        if found is None:
            raise ApiError(503, "the router does not answer", code="unavailable", retry_after_s=1.0)
        if not found:
            raise ApiError(404, "the router does not know that request", code="not_found")
        return {"object": "list", "data": [_shown(decision) for decision in found]}


async def _ask(explain: Explain, request_id: str) -> tuple[Decision, ...] | None:
    if not _ID.fullmatch(request_id):
        return ()
    answer: asyncio.Future[tuple[Decision, ...] | None] = asyncio.get_running_loop().create_future()

    def told(decisions: tuple[Decision, ...] | None) -> None:
        if not answer.done():
            answer.set_result(decisions)

    explain(request_id, told)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await answer
    except TimeoutError:
        return None


def _shown(decision: Decision) -> dict[str, Any]:
    return {**msgspec.to_builtins(decision), "regret_s": regret_s(decision)}
