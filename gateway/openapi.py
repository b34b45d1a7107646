"""How `/openapi.json` describes the routes that are no FastAPI functions."""

from typing import Any, Final

import msgspec

from baton.gateway.api_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

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


def describe(openapi: dict[str, Any]) -> None:
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
