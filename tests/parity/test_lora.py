"""LoRA adapters give the tokens of merged weights, in any mixture and on every topology."""

import secrets
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import torch

from baton.adapters import Adapter, AdapterFiles, read_adapter
from baton.engine.engine import Engine
from baton.errors import InvalidRequest
from baton.request import Request, StepOutput, TokenIds
from tests.cluster_threads import Cluster
from tests.lora_adapters import save_adapter, save_merged
from tests.parity.models import MODEL, Oracle
from tests.parity.runs import GREEDY, engine, forward_logits, prompts
from tests.parity.topologies import Side, Topology, alone, compare
from tests.tiny_models import run_to_end, token_ids
from tests.waiting import wait_for

Directory = Callable[..., Path]
LORA: Final[dict[str, Any]] = {"enable_lora": True, "max_loras": 2}
SAMPLING: Final = msgspec.structs.replace(GREEDY, max_tokens=12)


def asked(adapter: Adapter | None, tokens: Sequence[int]) -> Request:
    return Request(
        request_id=secrets.token_hex(16), token_ids=TokenIds.of(tokens), sampling=SAMPLING, adapter=adapter
    )


def mixed(model: Path, folder: Path) -> list[Request]:
    """Return requests for three adapters and for none, all for the same prompts: no page may be shared."""
    adapters = [
        None,
        save_adapter(model, folder / "a", seed=1),
        save_adapter(model, folder / "b", seed=2, rank=16, use_rslora=True),
        save_adapter(model, folder / "c", seed=3, rank=1, targets=("v_proj", "down_proj")),
    ]
    return [asked(adapter, tokens) for tokens in prompts() for adapter in adapters]


@pytest.mark.parametrize("name", ["llama-gqa7-biased", "qwen2"])
def test_adapter_gives_the_logits_and_tokens_of_merged_weights(
    name: str, model_directory: Directory, tmp_path: Path
) -> None:
    model = model_directory(name)
    adapter = save_adapter(model, tmp_path / "adapter", rank=4, use_rslora=True, deviation=0.1)
    save_merged(model, adapter, tmp_path / "merged")
    oracle, prompt = Oracle(tmp_path / "merged"), prompts()[-1]
    with engine(model, **LORA) as made:
        plain, logits = forward_logits(made, prompt), forward_logits(made, prompt, adapter)
        torch.testing.assert_close(logits, oracle.logits(prompt), atol=1e-4, rtol=1e-4)
        assert (plain - logits).abs().max() > 0.1, "the adapter changes little"
        got = alone(made, asked(adapter, prompt))
    assert got == oracle.greedy(prompt, got)


def test_mixture_of_adapters_changes_no_token(model_directory: Directory, tmp_path: Path) -> None:
    model = model_directory("llama2")
    requests = mixed(model, tmp_path)
    with engine(model) as bare:
        plain = [alone(bare, each) for each in requests if each.adapter is None]
    with engine(model, **LORA, scheduler={"max_num_batched_tokens": 48}) as made:
        expected = [alone(made, each) for each in requests]
        for request in requests:  # at once; there are more adapters than places for idle ones
            made.add(request)
        outputs = run_to_end(made)
    got = [token_ids([out for out in outputs if out.request_id == each.request_id]) for each in requests]
    assert got == expected
    assert plain == [tokens for each, tokens in zip(requests, expected, strict=True) if each.adapter is None]
    assert len({tuple(tokens) for tokens in expected[-4:]}) == 4, "adapters change nothing"


@pytest.mark.parametrize(
    "topology",
    [
        Topology(Side(pp=2), Side(tp=2)),
        pytest.param(Topology(), marks=pytest.mark.slow),
        pytest.param(Topology(Side(tp=2), Side(tp=2, pp=2)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adapters_give_the_tokens_of_one_engine(
    topology: Topology, model_directory: Directory, tmp_path: Path
) -> None:
    model = model_directory(MODEL)
    requests = mixed(model, tmp_path)
    prefill, decode = topology.engines(model)
    workers = [[msgspec.structs.replace(each, **LORA) for each in pool] for pool in (prefill, decode)]
    with engine(model, **LORA) as oracle, Cluster(*workers) as cluster:
        for _ in range(2):  # the second round finds the pages of the first
            compare(cluster, oracle, requests)
        cluster.check_nothing_is_held()


def test_adapter_is_refused_when_its_files_have_changed(model_directory: Directory, tmp_path: Path) -> None:
    model = model_directory("llama2")
    adapter = save_adapter(model, tmp_path / "adapter", seed=1)
    save_adapter(model, tmp_path / "adapter", seed=2)
    gone = Adapter(str(tmp_path / "gone"), adapter.digest)
    with engine(model, **LORA) as made:
        for refused, why in ((adapter, "have changed"), (gone, "no such file")):
            num_reads = made.load().counters["lora_reads"]
            two_choices = msgspec.structs.replace(SAMPLING, n=2, temperature=1.0)
            made.add(msgspec.structs.replace(asked(refused, [1, 2]), sampling=two_choices))
            outputs = run_to_end(made)
            assert [each.is_invalid and why in (each.error or "") for each in outputs] == [True, True]
            assert made.load().counters["lora_reads"] == num_reads + 1
            made.check(asked(refused, [1, 2]))  # the files are read again
            wait_for_reads(made, made.load().counters["lora_reads"] + 1)
            with pytest.raises(InvalidRequest, match=why):
                made.check(asked(refused, [1, 2]))
        made.scheduler.check_integrity()
    with engine(model) as bare, pytest.raises(InvalidRequest, match="--enable-lora"):
        bare.check(asked(adapter, [1, 2]))


def test_adapter_that_does_not_fit_leaves_nothing_in_memory(
    model_directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, begun = model_directory("llama2"), list[weakref.ref[torch.Tensor]]()

    def run_out_of_memory(slot: int, tensors: object) -> None:
        part = torch.zeros(1)
        begun.append(weakref.ref(part))
        raise RuntimeError("out of memory")

    with engine(model, **LORA) as made:
        monkeypatch.setattr(made.runner, "put_adapter", run_out_of_memory)
        made.add(asked(save_adapter(model, tmp_path / "adapter"), [1, 2]))
        (output,) = run_to_end(made)
        assert output.is_invalid and "out of memory" in (output.error or "")
        assert [each() for each in begun] == [None]


def test_other_ranks_need_no_files_of_an_adapter_that_was_accepted(
    model_directory: Directory, tmp_path: Path
) -> None:
    model = model_directory(MODEL)
    adapter, tokens = save_adapter(model, tmp_path / "adapter"), prompts()[0]
    with engine(model, **LORA) as oracle:
        expected = [alone(oracle, asked(each, tokens)) for each in (None, adapter)]
    with engine(model, **LORA, tensor_parallel_size=2) as made:
        made.check(asked(adapter, tokens))
        wait_for_reads(made, 1)
        shutil.rmtree(adapter.path)
        assert [alone(made, asked(each, tokens)) for each in (None, adapter)] == expected


def test_idle_adapters_leave_memory(model_directory: Directory, tmp_path: Path) -> None:
    model = model_directory("llama2")
    adapters = [save_adapter(model, tmp_path / str(seed), seed=seed, rank=1) for seed in range(5)]
    with engine(model, **LORA, max_cpu_loras=1) as made:
        for adapter in adapters:
            made.add(asked(adapter, [1, 2, 3]))
        run_to_end(made)
        alone(made, asked(adapters[0], [1, 2, 3]))
        for adapter in adapters:
            shutil.rmtree(adapter.path)
        answers = [alone(made, asked(each, [1, 2, 3])) for each in adapters]
    kept = [adapter for adapter, tokens in zip(adapters, answers, strict=True) if tokens != [None]]
    assert LORA["max_loras"] <= len(kept) <= LORA["max_loras"] + 1 and adapters[0] in kept


def test_waiting_requests_of_many_adapters_have_each_adapter_read_once(
    model_directory: Directory, tmp_path: Path
) -> None:
    model = model_directory("llama2")
    adapters = [save_adapter(model, tmp_path / str(seed), seed=seed, rank=1) for seed in range(6)]
    with engine(model, **LORA, max_cpu_loras=3) as made:
        requests = [asked(adapter, tokens) for tokens in prompts()[:3] for adapter in adapters]
        for _ in range(3):  # a decode worker checks requests long before they start
            for request in requests:
                made.check(request)
        wait_for_reads(made, 3)
        for request in requests:
            made.add(request)
        outputs = run_to_end(made)
        assert made.load().counters["lora_reads"] == len(adapters)
        expected = [alone(made, each) for each in requests]
    assert [
        token_ids([out for out in outputs if out.request_id == each.request_id]) for each in requests
    ] == expected


def test_other_requests_go_on_while_an_adapter_is_read(
    model_directory: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, goes_on = model_directory("llama2"), threading.Event()
    adapter, tokens = save_adapter(model, tmp_path / "adapter"), prompts()[0]

    def read_late(path: str, max_rank: int) -> AdapterFiles:
        goes_on.wait(60)
        return read_adapter(path, max_rank)

    monkeypatch.setattr("baton.engine.runner.model_runner.read_adapter", read_late)
    with engine(model, **LORA) as made:
        made.add(asked(adapter, tokens))
        other = asked(None, tokens)
        made.add(other)
        outputs = list[StepOutput]()
        while not outputs or outputs[-1].finish_reason is None:
            outputs += made.step()
        assert {each.request_id for each in outputs} == {other.request_id}
        goes_on.set()
        assert len(run_to_end(made)) == SAMPLING.max_tokens
        made.scheduler.check_integrity()


def test_request_that_ends_before_its_adapter_is_read_leaves_nothing(
    model_directory: Directory, tmp_path: Path
) -> None:
    model = model_directory("llama2")
    adapter, tokens = save_adapter(model, tmp_path / "adapter"), prompts()[0]
    with engine(model, **LORA) as made:
        gone = asked(adapter, tokens)
        made.add(gone)
        made.abort(gone.request_id)
        assert not made.has_work() and not run_to_end(made)
        assert len(alone(made, asked(adapter, tokens))) == SAMPLING.max_tokens
        made.scheduler.check_integrity()


def wait_for_reads(made: Engine, num_reads: int) -> None:
    wait_for(lambda: made.load().counters["lora_reads"] >= num_reads)
