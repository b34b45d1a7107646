"""LoRA adapters, which are loaded and unloaded while the server runs, as in vLLM.

gateway/http/auth.py admits operators alone.
"""

import asyncio
import time
import uuid
from pathlib import Path
from typing import Annotated, Final

import msgspec
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import PlainTextResponse
from msgspec import Meta

from baton.adapters import Adapter, AdapterPath, NamedAdapter, read_adapter
from baton.clock import Clock
from baton.errors import ModelError, WorkerLost
from baton.gateway.api.body import ClientBody, decode_body
from baton.gateway.api.body_reader import ServedModel, ServedModels
from baton.gateway.api.errors import ApiError, invalid
from baton.gateway.peer_gateways import PeerGateways
from baton.gateway.streams.request_stream import run_once
from baton.messages.bounds import MAX_NAME_CHARS, Name
from baton.request import Request, SamplingParams, TokenIds

FIRST_REQUEST_S: Final = 60.0  # for a worker to read an adapter and answer
EXCHANGE_S: Final = 5.0  # between two exchanges of changes with the other gateways
UNLOADED_NS: Final = 3600 * 10**9  # for which a gateway remembers that an adapter was unloaded


class LoadAdapter(ClientBody, frozen=True):
    """The body of `/v1/load_lora_adapter`."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    lora_path: AdapterPath
    load_inplace: bool = False  # in place of an adapter with the same name
    base_model_name: str | None = None  # the model that it changes; None where the gateway serves one model


class UnloadAdapter(ClientBody, frozen=True):
    """The body of `/v1/unload_lora_adapter`."""

    lora_name: str


class AdapterChange(msgspec.Struct, frozen=True):
    """The latest change of a name."""

    name: Name
    base: Name  # the name of the model that the adapter changes
    adapter: Adapter | None  # None: it was unloaded
    at_ns: int = 0  # in nanoseconds since 1970; 0: from the start

    @property
    def order(self) -> tuple[int, bytes]:
        """The later of two changes has the greater order, at every gateway."""
        return self.at_ns, b"" if self.adapter is None else self.adapter.digest


class AdapterChanges(msgspec.Struct, frozen=True):
    """The latest changes that a gateway knows of."""

    changes: tuple[AdapterChange, ...]


class ServedAdapters:
    """The adapters of the gateways behind one port.

    Each gateway keeps the latest change of every name, and exchanges its list with the others after a change
    and every EXCHANGE_S: a gateway that was busy, or that started again, has the changes of the others then.
    """

    def __init__(self, models: ServedModels, peers: PeerGateways, clock: Clock) -> None:
        """models: changes are made to their adapters. Made before `peers` listens."""
        self._models = models
        self._latest = {
            name: AdapterChange(name, model.name, each.adapter)
            for model in models
            for name, each in model.adapters.items()
        }
        self._clock = clock
        self._tell = peers.answer(AdapterChanges, AdapterChanges, self._take)

    async def keep_exchanging(self) -> None:
        """Exchange changes with the other gateways until cancelled."""
        while True:
            await asyncio.sleep(EXCHANGE_S)
            if self._latest:
                await self.exchange()

    async def exchange(self) -> None:
        """Take the changes of the other gateways, and let them take those of this one."""
        for reply in await self._tell(self._list()):
            self._take(reply)

    async def load(self, asked: LoadAdapter) -> None:
        """Serve an adapter, once a worker has computed a token with it. Raises ApiError and BatonError."""
        base, folder = self._base(asked), Path(asked.lora_path)
        self._check_free(asked)
        try:
            if not folder.is_dir():
                message = f"there is no folder {str(folder)!r}"
                raise ApiError(404, message, code="not_found", param="lora_path")
            files = await asyncio.to_thread(read_adapter, str(folder.resolve()))
        except (ModelError, OSError, ValueError) as error:  # ValueError: a null byte in the path
            raise invalid("lora_path", str(error)) from None
        adapter = Adapter(files.path, files.digest)
        request = Request(
            request_id=uuid.uuid4().hex,
            token_ids=TokenIds.of((0,)),
            sampling=SamplingParams(max_tokens=1, ignore_eos=True, seed=0),
            cache_salt=b"canary",
            adapter=adapter,
            model=base.key,
            arrival_s=self._clock.now_s(),
        )
        try:
            await run_once(base.service, request, FIRST_REQUEST_S)
        except TimeoutError:
            raise WorkerLost(f"no worker answered within {FIRST_REQUEST_S:g} s") from None
        self._check_free(asked)
        await self._change(asked.lora_name, base, adapter)

    async def unload(self, asked: UnloadAdapter) -> None:
        """Stop serving an adapter; its running requests continue. Raises ApiError 404."""
        base = self._models.find(asked.lora_name)
        if base is None or asked.lora_name not in base.adapters:
            message = f"The lora adapter '{asked.lora_name}' cannot be found."
            raise ApiError(404, message, code="not_found", param="lora_name")
        await self._change(asked.lora_name, base, None)

    def _base(self, asked: LoadAdapter) -> ServedModel:
        """Return the model that an adapter changes. Raises ApiError 400."""
        names, base = self._models.names, asked.base_model_name
        if base in names or (base is None and len(names) == 1):
            return self._models.of(base)
        raise invalid("base_model_name", f"name one of {', '.join(map(repr, names))}")

    def _check_free(self, asked: LoadAdapter) -> None:
        """Raise ApiError unless the name is free for an adapter."""
        name = asked.lora_name
        if name in self._models.names or (self._models.find(name) and not asked.load_inplace):
            raise invalid("lora_name", f"The lora adapter '{name}' has already been loaded.")

    async def _change(self, name: str, base: ServedModel, adapter: Adapter | None) -> None:
        before = self._latest.get(name)
        at_ns = max(time.time_ns(), 0 if before is None else before.at_ns + 1)
        self._note(AdapterChange(name, base.name, adapter, at_ns))
        await self.exchange()

    def _take(self, theirs: AdapterChanges) -> AdapterChanges:
        """Note the later changes of another gateway; return what is known then."""
        for each in theirs.changes:
            known = self._latest.get(each.name)
            if known is None or known.order < each.order:
                self._note(each)
        return self._list()

    def _note(self, change: AdapterChange) -> None:
        self._latest[change.name] = change
        for model in self._models:
            if change.adapter is None or model.name != change.base:
                model.adapters.pop(change.name, None)
            else:
                named = NamedAdapter(change.name, change.adapter, change.at_ns // 10**9)
                model.adapters[change.name] = named

    def _list(self) -> AdapterChanges:
        """Return the latest changes, without those of adapters that were unloaded long ago."""
        oldest_ns = time.time_ns() - UNLOADED_NS
        self._latest = {
            name: each
            for name, each in self._latest.items()
            if each.adapter is not None or each.at_ns > oldest_ns
        }
        return AdapterChanges(tuple(self._latest.values()))


def add_adapter_routes(app: FastAPI, adapters: ServedAdapters) -> None:
    """Add `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's bodies and answers."""

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: HttpRequest) -> PlainTextResponse:
        """Serve the LoRA adapter in a folder as a model of its own."""
        asked = decode_body(await request.body(), LoadAdapter)[0]
        await adapters.load(asked)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: HttpRequest) -> PlainTextResponse:
        """Stop serving a LoRA adapter."""
        asked = decode_body(await request.body(), UnloadAdapter)[0]
        await adapters.unload(asked)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")
