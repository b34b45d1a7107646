"""`baton serve --planner apply`: load comes and goes, and so does a worker."""

from pathlib import Path
from threading import Event, Thread
from typing import Final

import msgspec
import pytest

from baton.bench.sim.suite import usual_times
from baton.cluster.model_directory import resolve_model
from baton.cluster.planning import read_plans
from baton.config.engine import engine_config
from baton.engine.runner.model_runner import model_fingerprint
from baton.sim.timed.times import Curve, TimeModel
from tests.event_stream import SteadyClients
from tests.served import SERVE, Served, served, until

PROMPT: Final = "copy(sun moon star)="
BODY: Final = {"model": "tiny", "prompt": PROMPT, "max_tokens": 32, "temperature": 0, "stream": True}


def slow_times() -> TimeModel:
    """Times of tiny on no real machine: a prefill worker computes about one prompt of BODY a second."""
    model = engine_config({"model": str(resolve_model("tiny"))})
    times = msgspec.structs.replace(usual_times(), fingerprint=model_fingerprint(model))
    replica = times.replicas[1]
    steps = replica.steps
    curves = steps.curves | {"rows": Curve((0.1,))}
    slow = msgspec.structs.replace(steps, curves=curves)
    return msgspec.structs.replace(times, replicas={1: msgspec.structs.replace(replica, steps=slow)})


def ask_now_and_then(cluster: Served, is_over: Event, answers: set[str]) -> None:
    while not is_over.wait(2.0):
        answers.add(cluster.complete(PROMPT))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_planner_adds_a_worker_under_load_and_takes_it_away_later(tmp_path: Path) -> None:
    config, log = tmp_path / "serve.yaml", tmp_path / "plans.jsonl"
    slow_times().save(tmp_path / "times.json")
    planner = {
        "mode": "apply",
        "times": str(tmp_path / "times.json"),
        "log": str(log),
        "ttft_ms": 5000,
        "interval_s": 2,
        "max_workers": 3,
    }
    engine = {"cache": {"enable_prefix_caching": False}}  # or a worker would compute the prompt once
    config.write_bytes(msgspec.yaml.encode({"planner": planner, "engine": engine}))
    with served(*SERVE, "--config", str(config)) as cluster:
        is_over, answers = Event(), set[str]()
        asking = Thread(target=ask_now_and_then, args=(cluster, is_over, answers))
        asking.start()
        try:
            clients = SteadyClients(cluster.port, BODY)
            with clients.asking():
                until(lambda: set(cluster.status()) == {"prefill-0", "prefill-1", "decode-0"}, 60)
                clients.until_more()
            until(lambda: set(cluster.status()) == {"prefill-0", "decode-0"}, 120)
        finally:
            is_over.set()
            asking.join(60)
        assert answers == {"sun moon star"}
    plans = read_plans(log, 1000)
    actions = [(action.kind, action.role) for plan in plans for action in plan.actions]
    assert ("add", "prefill") in actions and ("remove", "prefill") in actions
    assert not any(plan.outcome == "manual" for plan in plans)
