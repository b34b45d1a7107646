"""A whole engine on the device: it captures while other threads use CUDA, and then compiles nothing."""

import random
import threading
from collections.abc import Iterator

import pytest
import torch

from baton.bench.engine.replica import load_replica, random_tokens, request_of
from baton.bench.gpu.model import CHECKED_SHAPE, step_arrays
from baton.engine.engine import Engine
from baton.kernels.triton.kernel import triton
from baton.request import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SETTINGS = {
    "device": "cuda",
    "max_model_len": 1024,
    "cache": {"kv_cache_memory_bytes": 2**26, "host_cache_memory_bytes": 2**24},
    "scheduler": {"max_num_seqs": 20, "max_num_batched_tokens": 700},
}


def use_cuda(stop: threading.Event) -> None:
    """Record and query events and pin memory, as the threads of transfers do."""
    stream = torch.cuda.Stream()
    while not stop.is_set():
        with torch.cuda.stream(stream):
            event = stream.record_event()
        torch.empty(2**16, pin_memory=True)
        event.query()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    stop = threading.Event()
    thread = threading.Thread(target=use_cuda, args=(stop,))
    thread.start()
    try:
        yield load_replica(CHECKED_SHAPE, SETTINGS)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("lengths", [(5,), (5, 33, 70), (300,)])
def test_replay_of_prompts_agrees_with_the_step_without_a_graph(
    lengths: tuple[int, ...], engine: Engine
) -> None:
    rng = random.Random(0)
    arrays = step_arrays([0] * len(lengths), [random_tokens(CHECKED_SHAPE, rng, each) for each in lengths])
    replayed_BV = engine.runner.execute(arrays).clone()
    computed_BV = engine.runner.execute(arrays._replace(num_layer_groups=1))
    torch.testing.assert_close(replayed_BV, computed_BV, atol=2e-2, rtol=2e-2)


def test_running_engine_compiles_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def note(**compilation: object) -> None:
        compiled.append(str(compilation["repr"]))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    rng = random.Random(0)
    for temperature in (0.0, 0.8):
        for _ in range(60):
            sampling = SamplingParams(
                temperature=temperature, top_p=0.9, max_tokens=rng.randint(1, 60), ignore_eos=True
            )
            engine.add(request_of(random_tokens(CHECKED_SHAPE, rng, rng.randint(1, 900)), sampling))
            engine.step()
        while engine.has_work():
            engine.step()
    assert compiled == []
