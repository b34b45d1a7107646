"""The answers of `/v1/responses` that a gateway keeps: for `previous_response_id`, and to be read again.

A response stays at the gateway that gave it; `ResponseStore.find` asks the other gateways of the port, too.
Each tenant has a store of its own, bounded in entries and in bytes: no tenant finds or evicts a response of
another one. The response that was used least recently is evicted first. An entry has its whole conversation,
so a response remains usable when an earlier one of the conversation is deleted or evicted.

The bytes of a response that a client reads are charged to the tenant, as those of an answer, until the client
has read them.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from baton.clock import Clock
from baton.gateway.api.body import read_query
from baton.gateway.api.errors import ApiError, ClientGone, invalid, unsupported
from baton.gateway.http.protocol import RESPONSE_WRITER, blocks_of, respond_in_turns
from baton.gateway.peer_gateways import PeerGateways
from baton.gateway.tenants.budget import Budget

ID_PREFIX: Final = "resp_"
OVERHEAD_BYTES: Final = 512  # of an entry, beside its content


class StoredResponse(msgspec.Struct, frozen=True):
    """A response and its conversation, as JSON."""

    response: bytes  # the whole object
    items: bytes  # a list: the items of the input, of earlier turns as well
    output: bytes  # a list: the items of the answer

    @property
    def conversation(self) -> bytes:
        """The items that precede the input of the next turn, as a JSON list."""
        inner = [part for part in (self.items[1:-1], self.output[1:-1]) if part]
        return b"[" + b",".join(inner) + b"]"

    @property
    def num_bytes(self) -> int:
        """Memory of the entry."""
        return len(self.response) + len(self.items) + len(self.output) + OVERHEAD_BYTES


class ResponseQuery(msgspec.Struct, frozen=True):
    """Asks another gateway for a stored response of a tenant. forgets: that gateway deletes the response."""

    tenant: str
    id: str
    forgets: bool = False


class _Shelf:
    """The responses of one tenant, the least recently used first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def remove(self, id: str) -> None:
        self.num_bytes -= self.entries.pop(id).num_bytes


class ResponseStore:
    """The stored responses of one gateway, by tenant."""

    def __init__(self, *, max_entries: int, max_bytes: int, peers: PeerGateways | None = None) -> None:
        """max_entries, max_bytes: of each tenant. peers: the other gateways of the port."""
        self._ask = None if peers is None else peers.answer(ResponseQuery, StoredResponse, self.tell)
        self.max_bytes = max_bytes
        self.is_on = max_entries > 0  # responses are stored at all
        self._max_entries = max_entries
        self._shelves: dict[str, _Shelf] = {}  # none is empty

    def put(self, tenant: str, id: str, stored: StoredResponse) -> bool:
        """Keep a response. Returns False, and keeps nothing, if the response exceeds the tenant's bound."""
        if not self.is_on or stored.num_bytes > self.max_bytes:
            return False
        shelf = self._shelves.setdefault(tenant, _Shelf())
        while shelf.entries and (
            len(shelf.entries) >= self._max_entries or shelf.num_bytes + stored.num_bytes > self.max_bytes
        ):
            shelf.remove(next(iter(shelf.entries)))
        shelf.entries[id] = stored
        shelf.num_bytes += stored.num_bytes
        return True

    async def find(
        self, tenant: str, id: str, *, param: str | None = None, forgets: bool = False
    ) -> StoredResponse:
        """Return a response of the tenant, also of another gateway. forgets: it is deleted.

        param: the key of the body that names the response. Raises ApiError 404, also for a response of
        another tenant.
        """
        query = ResponseQuery(tenant, id, forgets)
        found = self.tell(query)
        if found is None and self._ask is not None and self.is_on and id.startswith(ID_PREFIX):
            found = next(iter(await self._ask(query)), None)
        if found is None:
            raise _missing(id, param)
        return found

    def tell(self, query: ResponseQuery) -> StoredResponse | None:
        """Return a response of the tenant, which `forgets` deletes; None if this gateway has none."""
        shelf = self._shelves.get(query.tenant)
        if shelf is None or (found := shelf.entries.get(query.id)) is None:
            return None
        shelf.entries.move_to_end(query.id)
        if query.forgets:
            shelf.remove(query.id)
        if not shelf.entries:
            del self._shelves[query.tenant]
        return found

    def num_bytes(self, tenant: str) -> int:
        """Return the memory of a tenant's responses."""
        shelf = self._shelves.get(tenant)
        return 0 if shelf is None else shelf.num_bytes


def _missing(id: str, param: str | None) -> ApiError:
    name = f"{param}: " if param else ""
    message = (
        f"{name}the response {id[:80]!r} is not stored: it was never stored, was deleted, gave way to later "
        "ones, or its gateway has ended"
    )
    return ApiError(404, message, code="response_not_found", param=param)


class ItemsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a response's `input_items`."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20  # items
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None  # the id of an item


class _Item(msgspec.Struct):
    """The id of an item, as JSON; clients may leave it out."""

    id: msgspec.Raw = msgspec.Raw()


def list_items(stored: StoredResponse, id: str, query: Mapping[str, str]) -> Iterator[bytes]:
    """Yield a page of a response's input items, as OpenAI lists them, in parts. id: of the response.

    Some parts are empty. query: see ItemsQuery. Raises ApiError 400 that names another parameter or a wrong
    value.
    """
    asked = read_query(query, ItemsQuery)
    items = msgspec.json.decode(stored.items, type=list[msgspec.Raw])
    yield b""
    given = list[bytes]()
    for item in items:
        given.append(bytes(msgspec.json.decode(item, type=_Item).id))
        yield b""
    # A listed item has an id.
    names = [
        name or b'"item_%s%03x"' % (id.removeprefix(ID_PREFIX).encode(), at) for at, name in enumerate(given)
    ]
    order = list(range(len(items)))
    if asked.order == "desc":
        order.reverse()
    if asked.after is not None:
        after = msgspec.json.encode(asked.after)
        if after not in names:
            raise invalid("after", f"{asked.after[:80]!r} is no item of the response")
        order = order[[names[at] for at in order].index(after) + 1 :]
    page = order[: asked.limit]
    yield b'{"object":"list","data":['
    for number, at in enumerate(page):
        shown = bytes(items[at])
        yield b"," if number else b""
        yield from blocks_of(shown if given[at] else b'{"id":%s,%s' % (names[at], shown[1:]))
    first_id, last_id = (names[page[0]], names[page[-1]]) if page else (b"null", b"null")
    has_more = b"true" if len(order) > len(page) else b"false"
    yield b'],"has_more":%s,"first_id":%s,"last_id":%s}' % (has_more, first_id, last_id)


def add_response_routes(app: FastAPI, store: ResponseStore, answers: Budget, clock: Clock) -> None:
    """Add the routes under `/v1/responses/{id}`. answers: the bytes of answers that clients read."""
    missing: dict[int | str, dict[str, Any]] = {404: {"description": "The tenant has no such response"}}

    @app.get("/v1/responses/{id}", responses=missing)
    async def response(id: str, request: Request) -> Response:
        """Return a stored response."""
        for key in request.query_params:
            raise unsupported(key[:40])
        body = (await store.find(request.state.tenant.name, id)).response
        return _InTurns(blocks_of(body), len(body), answers, clock)

    @app.get("/v1/responses/{id}/input_items", responses=missing)
    async def input_items(id: str, request: Request) -> Response:
        """List the items of the conversation before the answer, the latest first unless `order=asc`."""
        stored = await store.find(request.state.tenant.name, id)
        return _InTurns(list_items(stored, id, request.query_params), stored.num_bytes, answers, clock)

    @app.delete("/v1/responses/{id}", responses=missing)
    async def delete(id: str, request: Request) -> dict[str, Any]:
        """Forget a stored response."""
        await store.find(request.state.tenant.name, id, forgets=True)
        return {"id": id, "object": "response", "deleted": True}


class _InTurns(Response):
    """JSON that is made in parts while the client reads; `num_bytes` are charged as those of an answer."""

    def __init__(self, parts: Iterable[bytes], num_bytes: int, answers: Budget, clock: Clock) -> None:
        super().__init__()
        self._parts = parts
        self._num_bytes = num_bytes
        self._answers = answers
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = scope["state"]["tenant"]
        with self._answers.charge(tenant.name, tenant.policy.quotas) as held, suppress(ClientGone):
            held.add(self._num_bytes)
            await respond_in_turns(send, self._parts, self._clock, scope["extensions"][RESPONSE_WRITER])
