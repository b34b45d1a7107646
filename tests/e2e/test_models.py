"""`baton serve --model a=... --model b=...`: two models behind one gateway, as a user runs them."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from baton.cluster.model_directory import resolve_model
from baton.cluster.offline.llm import LLM
from baton.config.engine import engine_config
from baton.engine.engine import load_engine
from baton.request import Request, SamplingParams, TokenIds
from tests.lora_adapters import save_adapter
from tests.served import Served, served, until
from tests.tiny_models import run_to_end, token_ids

OPTIONS = (
    "--runtime",
    "local",
    "--kv-cache-memory",
    "32MiB",
    "--drain-timeout",
    "5",
    "--router-policy",
    "prefix",
)
PROMPTS = ("copy(sun moon star)=", "sort(d a c b)=", "recall: the key of x is 5. " * 20)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `tiny` with other weights, which continues every prompt differently."""
    directory = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(resolve_model("tiny"), directory)
    path = directory / "model.safetensors"
    weights = load_file(path)
    for name in weights:
        if name.endswith("o_proj.weight"):
            weights[name] = weights[name].roll(1, 0)
    save_file(weights, path, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def cluster(other: Path) -> Iterator[Served]:
    models = "--model", "a=tiny", "--model", f"b={other}", "--enable-lora"
    with served(*models, "--prefill", "1", "--decode", "1", *OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def expected(other: Path) -> dict[str, list[list[int]]]:
    """The tokens of one plain engine of each model."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = {}
    for name, model in (("a", "tiny"), ("b", str(other))):
        with LLM(model) as llm:
            answers = llm.generate(list(PROMPTS), sampling)
            found[name] = [list(answer.outputs[0].token_ids) for answer in answers]
    assert all(one != two for one, two in zip(found["a"], found["b"], strict=True))
    return found


def body(model: str, prompt: str, **fields: Any) -> dict[str, Any]:
    asked = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    return asked | {"ignore_eos": True, "return_token_ids": True} | fields


def tokens(cluster: Served, model: str, prompt: str) -> list[int]:
    status, answer = cluster.post("/v1/completions", body(model, prompt))
    assert status == 200, answer
    assert answer["model"] == model
    return list(answer["choices"][0]["token_ids"])


def tokens_of(cluster: Served, model: str, prompt: str, max_tokens: int) -> Iterator[list[int]]:
    """Yield the tokens of each chunk of a stream."""
    asked = body(model, prompt, max_tokens=max_tokens)
    for chunk in cluster.stream(**asked):
        yield list(chunk["choices"][0].get("token_ids") or ())  # the last chunk has the reason alone


def metrics(cluster: Served) -> dict[str, Metric]:
    """Return the families of `/metrics` by name."""
    families = text_string_to_metric_families(cluster.get("/metrics").text)
    return {family.name: family for family in families}


def test_each_model_answers_with_the_tokens_of_its_own_plain_engine(
    cluster: Served, expected: dict[str, list[list[int]]]
) -> None:
    for number, prompt in enumerate(PROMPTS):
        for model in ("a", "b", "a"):
            assert tokens(cluster, model, prompt) == expected[model][number]


def test_all_models_are_listed_and_an_unknown_name_is_404(cluster: Served) -> None:
    listed = cluster.get("/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["a", "b"]
    assert cluster.get("/v1/models/b").json()["id"] == "b"
    status, answer = cluster.post("/v1/completions", body("c", "x"))
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert answer["error"]["message"].startswith("The model `c` does not exist.")


def test_request_that_names_no_model_gets_the_first(cluster: Served) -> None:
    status, answer = cluster.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert (status, answer["model"]) == (200, "a")


def test_chats_and_tokenize_use_the_model_that_they_name(cluster: Served) -> None:
    for model in ("a", "b"):
        chat = {"model": model, "messages": [{"role": "user", "content": "copy(sun)="}], "max_tokens": 2}
        status, answer = cluster.post("/v1/chat/completions", chat)
        assert (status, answer["model"]) == (200, model)
        assert cluster.post("/tokenize", {"model": model, "prompt": "copy(sun)="})[0] == 200


def test_adapter_changes_the_model_that_it_names(
    cluster: Served, other: Path, expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    adapter = save_adapter(other, tmp_path / "law")
    asked = {"lora_name": "law", "lora_path": adapter.path}
    refused = cluster.http("POST", "/v1/load_lora_adapter", **asked)
    assert refused.status_code == 400 and "base_model_name: name one of 'a', 'b'" in refused.text
    assert cluster.http("POST", "/v1/load_lora_adapter", **asked, base_model_name="b").status_code == 200
    listed = cluster.get("/v1/models").json()["data"]
    assert {card["id"]: card["parent"] for card in listed} == {"a": None, "b": None, "law": "b"}
    status, prompt = cluster.post("/tokenize", {"model": "law", "prompt": PROMPTS[0]})
    assert status == 200
    cache = {"kv_cache_memory_bytes": 2**24}
    config = engine_config({"model": str(other), "device": "cpu", "enable_lora": True, "cache": cache})
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with closing(load_engine(config)) as engine:
        ids = TokenIds.of(prompt["tokens"])
        engine.add(Request(request_id="r", token_ids=ids, sampling=sampling, adapter=adapter))
        adapted = token_ids(run_to_end(engine))
    assert tokens(cluster, "law", PROMPTS[0]) == adapted != expected["b"][0]
    assert tokens(cluster, "b", PROMPTS[0]) == expected["b"][0]
    assert cluster.http("POST", "/v1/unload_lora_adapter", lora_name="law").status_code == 200
    assert cluster.post("/v1/completions", body("law", "x"))[0] == 404


def test_metrics_with_names_of_vllm_have_the_label_of_their_model(cluster: Served) -> None:
    tokens(cluster, "b", PROMPTS[0])
    families = metrics(cluster)
    for name in ("generation_tokens", "prompt_tokens", "num_requests_running", "time_to_first_token_seconds"):
        labels = {sample.labels["model_name"] for sample in families[f"vllm:{name}"].samples}
        assert labels == {"a", "b"}, name
    by_model = {each.labels["model_name"]: each.value for each in families["vllm:generation_tokens"].samples}
    own = sum(each.value for each in families["baton_generation_tokens"].samples)
    assert by_model["b"] >= NUM_TOKENS and sum(by_model.values()) == own


def test_health_status_and_top_show_the_workers_of_both_models(cluster: Served) -> None:
    assert cluster.get("/health").json()["models"] == ["a", "b"]
    names = {f"{model}-{role}-0" for model in ("a", "b") for role in ("prefill", "decode")}
    assert set(cluster.status()) == names
    assert "b-decode-0" in cluster.baton("status", "--port", str(cluster.port))


def test_killed_worker_of_one_model_does_not_touch_a_stream_of_the_other(
    cluster: Served, expected: dict[str, list[list[int]]]
) -> None:
    prompt, before = PROMPTS[0], cluster.status()["b-decode-0"].worker.id
    stream = tokens_of(cluster, "a", prompt, 1500)
    got = next(stream)
    replays = frontend_events(cluster)
    os.kill(cluster.pid_of("b-decode-0"), signal.SIGKILL)
    for chunk in stream:
        got += chunk
    assert len(got) == 1500 and got[:NUM_TOKENS] == expected["a"][0]
    assert frontend_events(cluster) == replays
    until(lambda: cluster.has_replaced("b-decode-0", before))
    until(lambda: cluster.post("/v1/completions", body("b", prompt))[0] == 200)
    assert tokens(cluster, "b", prompt) == expected["b"][0]


def frontend_events(cluster: Served) -> dict[str, float]:
    """Return the replays that the gateway has counted, by reason."""
    samples = metrics(cluster)["baton_frontend"].samples
    return {
        each.labels["event"]: each.value for each in samples if each.labels["event"].startswith("replays_")
    }


def test_scale_changes_the_workers_of_the_named_model(cluster: Served) -> None:
    port = ("--port", str(cluster.port))
    with pytest.raises(subprocess.CalledProcessError) as refused:
        cluster.baton("scale", "1P2D", *port)
    assert "name one of a, b" in refused.value.stderr
    assert "1P2D" in cluster.baton("scale", "1P2D", "--model", "b", *port)
    assert {"b-decode-0", "b-decode-1", "a-decode-0"} <= set(cluster.status())
    assert "a-decode-1" not in cluster.status()
    cluster.baton("scale", "1P1D", "--model", "b", *port)


# Sleep, of one of the models.


def is_sleeping(cluster: Served, model: str) -> bool:
    return bool(cluster.get(f"/is_sleeping?model={model}").json()["is_sleeping"])


def memory(cluster: Served, worker: str) -> int:
    """Return the resident bytes of a worker's process, shared ones included."""
    return int(psutil.Process(cluster.pid_of(worker)).memory_info().rss)


def has_pages(cluster: Served, worker: str) -> bool:
    """Return whether the worker's process has a pool of KV pages in its memory."""
    return "baton-kv" in Path(f"/proc/{cluster.pid_of(worker)}/maps").read_text()


def test_sleep_frees_the_memory_of_one_model_and_wake_brings_its_tokens_back(
    cluster: Served, expected: dict[str, list[list[int]]]
) -> None:
    long = "x " * 1500  # its pages fill a part of the pool
    assert cluster.post("/v1/completions", body("b", long, max_tokens=1))[0] == 200
    before = {name: memory(cluster, name) for name in ("a-decode-0", "b-decode-0", "b-prefill-0")}
    assert all(has_pages(cluster, name) for name in before)
    running = tokens_of(cluster, "b", PROMPTS[0], 400)
    other = tokens_of(cluster, "a", PROMPTS[1], 1200)
    got, got_other = next(running), next(other)
    assert cluster.http("POST", "/sleep?model=b&level=1").status_code == 200
    assert is_sleeping(cluster, "b") and not is_sleeping(cluster, "a")
    for stream, tokens_so_far in ((running, got), (other, got_other)):  # the running request has ended first
        for chunk in stream:
            tokens_so_far += chunk
    assert (len(got), len(got_other)) == (400, 1200)
    assert (got[:NUM_TOKENS], got_other[:NUM_TOKENS]) == (expected["b"][0], expected["a"][1])
    for name in ("b-decode-0", "b-prefill-0"):
        assert memory(cluster, name) < before[name] - 2 * 2**20  # its weights and a few pages
        assert not has_pages(cluster, name)
        assert cluster.status()[name].worker.is_asleep
        assert "asleep" in cluster.baton("status", "--port", str(cluster.port))
    refused, answer = cluster.post("/v1/completions", body("b", "x"))
    assert (refused, answer["error"]["code"]) == (503, "model_asleep")
    assert cluster.get("/health").json()["asleep"] == ["b"]
    assert tokens(cluster, "a", PROMPTS[0]) == expected["a"][0]
    assert cluster.http("POST", "/wake_up?model=b").status_code == 200
    assert not is_sleeping(cluster, "b")
    for number, prompt in enumerate(PROMPTS):
        assert tokens(cluster, "b", prompt) == expected["b"][number]


def test_commands_have_a_model_sleep_and_wake(cluster: Served, expected: dict[str, list[list[int]]]) -> None:
    port = ("--port", str(cluster.port))
    assert cluster.baton("sleep", "b", "--level", "2", *port) == "b sleeps\n"
    assert is_sleeping(cluster, "b")
    assert cluster.baton("wake", "b", *port) == "b serves again\n"
    assert tokens(cluster, "b", PROMPTS[0]) == expected["b"][0]


def test_order_for_a_model_that_is_not_named_or_not_there_is_refused(cluster: Served) -> None:
    assert cluster.http("POST", "/sleep").status_code == 400
    assert cluster.http("POST", "/sleep?model=c").status_code == 404
    assert cluster.http("POST", "/sleep?model=a&level=3").status_code == 400
    assert cluster.http("POST", "/wake_up?model=a&tags=weights").status_code == 400
    assert not is_sleeping(cluster, "a")
