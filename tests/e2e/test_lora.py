"""LoRA adapters through the shared cluster: a prefill worker, two decode workers and two gateways."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import openai
import pytest

from baton.adapters import CONFIG_FILE, WEIGHTS_FILE, Adapter
from baton.config.engine import engine_config
from baton.engine.engine import load_engine
from baton.gateway.api.body_reader import BodyReader
from baton.request import Request, SamplingParams, TokenIds
from tests.lora_adapters import save_adapter
from tests.scripted_service import ScriptedService, answer_at_once
from tests.served import ROOT, Served
from tests.served_gateway import ServedGateway
from tests.tiny_models import run_to_end, token_ids
from tests.waiting import wait_for

TINY = ROOT / "engine" / "tiny"
PROMPT = [*range(3, 40), 5]  # two full pages
LENGTH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, Adapter]:
    return {name: save_adapter(TINY, folder / name, seed=seed) for seed, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def cluster(redundant_cluster: Served) -> Served:
    return redundant_cluster


@pytest.fixture(scope="module")
def one(cluster: Served, adapters: dict[str, Adapter]) -> Iterator[str]:
    """The name of an adapter that is loaded for all tests."""
    with loaded(cluster, "one", adapters["one"]) as name:
        yield name


@pytest.fixture(scope="module")
def expected(adapters: dict[str, Adapter]) -> dict[str, list[int | None]]:
    """The tokens of one engine, by the name of the model."""
    settings = {"model": str(TINY), "device": "cpu", "enable_lora": True}
    engine = load_engine(engine_config({**settings, "cache": {"kv_cache_memory_bytes": 2**24}}))
    found = {}
    for name, adapter in {"tiny": None, **adapters}.items():
        sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
        tokens = TokenIds.of(PROMPT)
        engine.add(Request(request_id=name, token_ids=tokens, sampling=sampling, adapter=adapter))
        found[name] = token_ids(run_to_end(engine))
    engine.close()
    assert len({tuple(tokens) for tokens in found.values()}) == len(found), "adapters change nothing"
    return found


def complete(cluster: Served, model: str, length: int = LENGTH) -> list[int]:
    """Return the tokens of a new connection, which any gateway may get."""
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"ignore_eos": True, "return_token_ids": True}
        answer = client.completions.create(
            model=model, prompt=PROMPT, temperature=0, max_tokens=length, extra_body=extra
        )
    assert answer.model == model
    found: list[int] = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
    return found


def call(cluster: Served, path: str, **body: Any) -> tuple[int, str]:
    """Return the status and the text of an answer."""
    answer = cluster.http("POST", f"/v1{path}", **body)
    return answer.status_code, answer.text


def load(cluster: Served, name: str, folder: Path | str) -> tuple[int, str]:
    return call(cluster, "/load_lora_adapter", lora_name=name, lora_path=str(folder))


def models(cluster: Served) -> dict[str, str | None]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        return {each.id: each.model_extra["parent"] for each in client.models.list()}  # type: ignore[index]


@contextmanager
def loaded(cluster: Served, name: str, adapter: Adapter) -> Iterator[str]:
    answer = load(cluster, name, adapter.path)
    assert answer == (200, f"Success: LoRA adapter '{name}' added successfully.")
    wait_for(lambda: all(name in models(cluster) for _ in range(8)), interval_s=0.1)  # at both gateways
    yield name
    call(cluster, "/unload_lora_adapter", lora_name=name)


@pytest.fixture
def two(cluster: Served, adapters: dict[str, Adapter]) -> Iterator[str]:
    """The name of an adapter that is loaded for one test."""
    with loaded(cluster, "two", adapters["two"]) as name:
        yield name


def test_models_are_mixed_through_both_gateways(
    cluster: Served, one: str, two: str, expected: dict[str, list[int | None]]
) -> None:
    assert models(cluster) == {"tiny": None, one: "tiny", two: "tiny"}
    got: list[tuple[str, Sequence[int]]] = []
    names = [*expected] * 4
    threads = [Thread(target=lambda name=name: got.append((name, complete(cluster, name)))) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == len(names)
    assert all(tokens == expected[name] for name, tokens in got), got


def test_unloaded_adapter_ends_its_running_request_well(cluster: Served, two: str) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        stream = client.completions.create(
            model=two,
            prompt=PROMPT,
            temperature=0,
            max_tokens=150,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        answer = call(cluster, "/unload_lora_adapter", lora_name=two)
        assert answer == (200, "Success: LoRA adapter 'two' removed successfully.")
        last = [chunk.choices[0].finish_reason for chunk in stream][-1]
    assert last == "length"
    wait_for(lambda: not any(two in models(cluster) for _ in range(8)), interval_s=0.1)  # at both gateways
    with pytest.raises(openai.NotFoundError):
        complete(cluster, two)
    assert call(cluster, "/unload_lora_adapter", lora_name=two)[0] == 404


def test_restarted_worker_and_gateway_have_the_adapters_again(
    cluster: Served, two: str, expected: dict[str, list[int | None]]
) -> None:
    worker, gateways = cluster.status()["decode-0"].worker.id, cluster.gateways()
    for pid in (cluster.pid_of("decode-0"), min(gateways)):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: cluster.has_replaced("decode-0", worker), timeout_s=60, interval_s=0.2)
    wait_for(lambda: len(cluster.gateways() - {min(gateways)}) == 2, timeout_s=60, interval_s=0.2)
    wait_for(cluster.answers, timeout_s=60, interval_s=0.2)
    for _ in range(4):
        assert complete(cluster, two) == expected[two]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 17}, "--max-lora-rank"),
        ({"target_modules": ["lm_head"]}, "lm_head"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 8}, "of floats"),
    ],
)
def test_adapter_that_does_not_fit_is_refused_by_name(
    cluster: Served, tmp_path: Path, keys: dict[str, Any], why: str
) -> None:
    save_adapter(TINY, tmp_path)
    raw = (tmp_path / CONFIG_FILE).read_bytes()
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**json.loads(raw), **keys}))
    status, text = load(cluster, "bad", tmp_path)
    assert status == 400 and why in text, text
    assert "bad" not in models(cluster)


def test_damaged_missing_and_doubled_adapters_are_refused(cluster: Served, one: str, tmp_path: Path) -> None:
    save_adapter(TINY, tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes((tmp_path / WEIGHTS_FILE).read_bytes()[:-8])
    status, text = load(cluster, "bad", tmp_path)
    assert status == 400 and "safetensors" in text, text
    assert load(cluster, "bad", tmp_path / "missing")[0] == 404
    for name in (one, "tiny"):
        status, text = load(cluster, name, tmp_path)
        assert status == 400 and "already been loaded" in text
    assert call(cluster, "/load_lora_adapter", lora_name="bad")[0] == 400


def test_adapter_that_is_unloaded_while_a_body_is_read_still_answers_it(
    adapters: dict[str, Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, is_reading, goes_on = list[Adapter | None](), threading.Event(), threading.Event()
    read = BodyReader.read

    async def read_slowly(reader: BodyReader, *arguments: Any) -> Any:
        found = await read(reader, *arguments)
        is_reading.set()
        await asyncio.to_thread(goes_on.wait, 30)
        return found

    def play(service: ScriptedService, request: Request) -> None:
        asked.append(request.adapter)
        answer_at_once([5])(service, request)

    with ServedGateway(lambda: ScriptedService(play)) as gateway, ThreadPoolExecutor(1) as threads:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        load = {"lora_name": "one", "lora_path": adapters["one"].path}
        client.post("/load_lora_adapter", body=load, cast_to=str)
        monkeypatch.setattr(BodyReader, "read", read_slowly)
        answer = threads.submit(client.completions.create, model="one", prompt=PROMPT, max_tokens=1)
        assert is_reading.wait(30)
        client.post("/unload_lora_adapter", body={"lora_name": "one"}, cast_to=str)
        goes_on.set()
        assert answer.result().model == "one"
        assert asked == [adapters["one"]] * 2
