"""An architecture from outside the tree runs through the whole engine once the registry lists it."""

from pathlib import Path

import pytest

from baton.engine.models.architecture import Architecture, Traits
from baton.engine.models.json_file import JsonObject
from baton.engine.models.registry import ARCHITECTURES
from tests.tiny_models import generate, tiny_engine, token_ids, write_config

PROMPT = [5, 9, 2, 7, 1, 8, 3]


def read_traits(keys: JsonObject, num_layers: int) -> Traits:
    """Every second layer slides over two tokens."""
    windows = tuple(2 if layer % 2 else None for layer in range(num_layers))
    return Traits(qk_norm=True, qkv_bias=True, sliding_windows=windows)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        ARCHITECTURES, "OutsideForCausalLM", Architecture(model_type="outside", read_traits=read_traits)
    )


def answer(directory: Path, **keys: object) -> list[int | None]:
    engine = tiny_engine(write_config(directory, **keys))
    try:
        return token_ids(generate(engine, PROMPT, max_tokens=12, ignore_eos=True))
    finally:
        engine.close()


@pytest.mark.usefixtures("outside")
def test_outside_architecture_generates_by_name_and_by_model_type(tmp_path: Path) -> None:
    named = answer(tmp_path, architectures=["OutsideForCausalLM"], model_type="llama")
    assert len(named) == 12
    assert answer(tmp_path, architectures=None, model_type="outside") == named
    assert answer(tmp_path, architectures=["LlamaForCausalLM"], model_type="outside") != named
