"""The decode suite on a tiny model: every part gives rates, and what it compares."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.bench.engine import decode
from baton.bench.engine.replica import TOY_LLAMA
from baton.kernels import native
from tests.tiny_models import write_config

pytestmark = pytest.mark.usefixtures("ranks_are_forked")


@pytest.fixture(autouse=True)
def threads_are_as_before() -> Iterator[None]:
    num_threads = native.num_threads()
    yield
    native.set_num_threads(num_threads)


def rows_of(part: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Run a part as a command; return its rows by name."""
    write_config(folder)
    decode.measure.main(None, [part, "--model", str(folder), "--rounds", "1", "--output", str(folder)])
    return {row["name"]: row for row in json.loads((folder / f"decode-{part}.json").read_text())["rows"]}


def test_quantised_engines_are_compared_with_the_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "QUANTIZATION_BARS", {1: {"int4": 1e-6}, 3: {}})
    monkeypatch.setattr(decode, "METHODS", ("int4",))
    rows = rows_of("quantization", tmp_path)
    names = ["plain", "int4", "int4 / plain"]
    assert list(rows) == [f"{name}, batch {batch}" for batch in (1, 3) for name in names]
    assert all(row["value"] > 0 for row in rows.values())
    assert [rows[f"int4 / plain, batch {batch}"]["met"] for batch in (1, 3)] == [True, None]


def test_stages_are_compared_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PIPELINE_TOKENS", 4)
    rows = rows_of("pipeline", tmp_path)
    assert rows["1 stages of 1 thread"]["value"] > 0 and rows["2 stages / 1"]["value"] > 0
    assert [rows[f"  stage {stage} is busy"]["note"] for stage in (0, 1)] == ["1 layers"] * 2
    assert rows["bubble, batch 16"]["limit"] == "<= 10"


def test_adapters_are_compared_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "NUM_ADAPTERS", 2)
    rows = rows_of("lora", tmp_path)
    assert rows["2 adapters / 1 adapter, batch 2"]["limit"] == ">= 0.85"
    assert rows["no adapter, batch 2"]["value"] > 0


def test_pages_of_one_byte_are_compared_with_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "CONTEXTS", (64,))
    rows = rows_of("kv-dtype", tmp_path)
    assert rows["int8: pages a GiB over plain"]["value"] > 1.5
    assert rows["fp8 / plain, batch 8, 64 tokens"]["value"] > 0


def test_ranks_of_experts_give_the_tokens_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "LLAMA_56M", TOY_LLAMA)
    monkeypatch.setitem(decode.MIXTURE, "moe_intermediate_size", 32)
    monkeypatch.setattr(decode, "EXPERT_TOKENS", 4)
    decode.measure.main(None, ["experts", "--rounds", "1", "--output", str(tmp_path)])
    rows = {row["name"]: row for row in json.loads((tmp_path / "decode-experts.json").read_text())["rows"]}
    assert rows["batches with other tokens than one rank"]["value"] == 0
    assert rows["two ranks, whole experts, batch 32"]["value"] > 0
