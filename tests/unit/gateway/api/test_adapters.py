"""The adapters of the gateways behind one port."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from baton.adapters import CONFIG_FILE, WEIGHTS_FILE
from baton.clock import ManualClock
from baton.gateway.api.adapters import LoadAdapter, ServedAdapters, UnloadAdapter
from baton.gateway.api.body_reader import ServedModels
from baton.gateway.api.errors import ApiError
from baton.gateway.peer_gateways import PeerGateways
from baton.messages.bounds import Kind
from baton.messages.workers import Address
from baton.rpc.auth import KeyRing
from tests.event_loop import on_loop
from tests.scripted_service import ScriptedService, answer_at_once
from tests.unit.gateway.calls import served_model


class Gateway:
    """The adapters of one gateway, whose workers take any."""

    def __init__(self, peers: PeerGateways, names: Sequence[str]) -> None:
        self.service = ScriptedService(answer_at_once([1]))
        self.models = ServedModels([served_model(self.service, name=name, key=name) for name in names])
        self.adapters = ServedAdapters(self.models, peers, ManualClock())
        self.peers = peers

    @property
    def paths(self) -> dict[str, str]:
        return {name: each.adapter.path for model in self.models for name, each in model.adapters.items()}

    @property
    def bases(self) -> dict[str, str]:
        return {name: model.name for model in self.models for name in model.adapters}


@asynccontextmanager
async def two_gateways(*models: str) -> AsyncIterator[tuple[Gateway, Gateway]]:
    key = secrets.token_bytes(32)
    ring = KeyRing.of(key, Kind.GATEWAY)
    names = models or ("tiny",)
    gateways = Gateway(PeerGateways(ring), names), Gateway(PeerGateways(ring), names)
    for each in gateways:
        each.peers.listen(Address("127.0.0.1", int.from_bytes(key[:2], "big") + 1))
    try:
        yield gateways
    finally:
        for each in gateways:
            await each.peers.close()


def adapter_in(folder: Path, *, alpha: int = 1) -> LoadAdapter:
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": alpha}
    (folder / CONFIG_FILE).write_text(msgspec.json.encode(config).decode())
    (folder / WEIGHTS_FILE).write_bytes(b"")
    return LoadAdapter("one", str(folder), load_inplace=True)


@on_loop
async def test_gateways_that_load_at_once_serve_the_same_adapter(tmp_path: Path) -> None:
    asked = [adapter_in(tmp_path / name, alpha=alpha) for alpha, name in enumerate("ab", 1)]
    async with two_gateways() as (first, second):
        for _ in range(4):
            await asyncio.gather(first.adapters.load(asked[0]), second.adapters.load(asked[1]))
            await first.adapters.exchange()
            assert first.paths == second.paths and len(first.paths) == 1


@on_loop
async def test_gateway_that_missed_changes_has_them_after_an_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_gateways() as (first, second):
        await first.adapters.load(adapter_in(tmp_path))
        assert first.paths == second.paths == {"one": str(tmp_path)}
        with monkeypatch.context() as away:
            away.setattr(first.peers, "_names", lambda: ())
            await first.adapters.unload(UnloadAdapter("one"))
        assert not first.paths and second.paths
        await second.adapters.exchange()
        assert not second.paths
        await second.adapters.load(adapter_in(tmp_path))
        assert first.paths == second.paths == {"one": str(tmp_path)}


@on_loop
async def test_adapter_is_loaded_once_unless_it_is_replaced(tmp_path: Path) -> None:
    async with two_gateways() as (first, second):
        await first.adapters.load(adapter_in(tmp_path))
        again = msgspec.structs.replace(adapter_in(tmp_path), load_inplace=False)
        with pytest.raises(ApiError, match="already been loaded"):
            await second.adapters.load(again)
        with pytest.raises(ApiError, match="too long"):
            await first.adapters.load(LoadAdapter("two", "/" + "a" * 300))


@on_loop
async def test_adapter_of_one_of_several_models_names_its_base(tmp_path: Path) -> None:
    asked = adapter_in(tmp_path)
    async with two_gateways("a", "b") as (first, second):
        for base in (None, "c", "one"):
            with pytest.raises(ApiError, match="base_model_name: name one of 'a', 'b'"):
                await first.adapters.load(msgspec.structs.replace(asked, base_model_name=base))
        await first.adapters.load(msgspec.structs.replace(asked, base_model_name="b"))
        assert [request.model for request in first.service.requests] == ["b"]
        assert first.bases == second.bases == {"one": "b"}
        assert second.models.of("one").name == "b"
        await second.adapters.load(msgspec.structs.replace(asked, base_model_name="a"))
        assert first.bases == second.bases == {"one": "a"}
        taken = msgspec.structs.replace(asked, lora_name="b", base_model_name="a")
        with pytest.raises(ApiError, match="already been loaded"):
            await first.adapters.load(taken)
        await first.adapters.unload(UnloadAdapter("one"))
        assert not first.bases and not second.bases
