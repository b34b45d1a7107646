"""`baton serve tiny --runtime local`, as a user runs it."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from baton.bench.tiny.tasks import recall_cases
from baton.cluster.cluster_record import find_record
from baton.cluster.redis_server import find_program
from baton.cluster.runtimes.base import descendants
from baton.config.environment import cache_directory
from tests.served import BATON, SERVE, Served, are_gone, served, until

# An idle decode worker computes prompts itself by the default policy; by this one it never does.
ALWAYS_APART = ("--router-policy", "prefix")
COPY = ("copy(sun moon star)=", "sun moon star")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Served]:
    """A second signal ends the cluster at once, though a stream runs."""
    options = (*ALWAYS_APART, "--routers", "2", "--decode", "2", "--drain-timeout", "600")
    with served(*SERVE, *options, program=BATON) as found:
        yield found
        pids, num_said = descendants(found.process.pid), len(found.said)
        stream = found.stream(COPY[0], max_tokens=4000, ignore_eos=True)
        next(stream)  # and it is kept open
        for _ in range(2):
            found.process.send_signal(signal.SIGTERM)
            until(lambda: any("draining" in line for line in found.said[num_said:]))
        assert found.process.wait(30) == 130
        stream.close()
        assert not any("Traceback" in line for line in found.said[num_said:])
    assert are_gone(pids)


def test_the_curl_of_the_banner_prints_the_answer_that_it_promises(cluster: Served) -> None:
    promised = cluster.banner.partition("? is ")[2].partition(",")[0]
    (curl,) = [line for line in cluster.banner.splitlines() if line.startswith("curl ")]
    answer = subprocess.run(shlex.split(curl), capture_output=True, text=True, check=True, timeout=30).stdout
    assert f'"text":" {promised}"' in answer


def test_long_prompts_are_computed_by_the_prefill_worker_and_answered_by_others(cluster: Served) -> None:
    for case in recall_cases(8, 900, seed=3):
        assert cluster.complete(case.prompt, 4) == case.answer
    # What the router knows is a second old. The first prompts may come before the workers have met.
    until(lambda: cluster.status()["prefill-0"].load.num_tokens >= 4)
    until(lambda: cluster.status()["prefill-0"].load.kv_bytes > 0)
    workers = cluster.status()
    decode_ids = {entry.worker.id for name, entry in workers.items() if name != "prefill-0"}
    sent_to = workers["prefill-0"].load.kv_bytes_to
    assert sent_to and sent_to.keys() <= decode_ids
    until(lambda: num_cached_by_decode_workers(cluster) >= 8 * (900 // 16))


def num_cached_by_decode_workers(cluster: Served) -> int:
    """Pages in the latest reports; a worker that has just joined has sent none."""
    decode_workers = (entry for name, entry in cluster.status().items() if name.startswith("decode-"))
    return sum(entry.load.pages.get("cached", 0) for entry in decode_workers)


def test_routing_decision_is_shown_by_http_and_by_explain(cluster: Served) -> None:
    answer = cluster.ask("/v1/completions", prompt=COPY[0] * 8, max_tokens=2)

    def decided() -> dict[str, Any]:
        (decision,) = cluster.get(f"/admin/decisions/{answer['id']}").json()["data"]
        assert isinstance(decision, dict)
        return decision

    until(lambda: decided()["first_token_s"] is not None)  # its gateway says so a moment after the answer
    decision = decided()
    assert decision["reason"] == "prefix" and decision["chosen"] in decision["weighed"]
    assert decision["first_token_s"] > 0 and decision["chosen"]["terms"]["compute_s"] > 0
    told = cluster.baton("explain", answer["id"], "--port", str(cluster.port))
    assert "prefill-0" in told and "decode-0" in told


def test_chat_answers(cluster: Served) -> None:
    assert "prefill and decode" in cluster.baton(
        "chat", "--url", cluster.url, "--temperature", "0", "What is Baton?"
    )


def test_a_router_and_a_gateway_that_are_killed_come_back_where_they_were(cluster: Served) -> None:
    record = find_record(cluster.port)
    for port in (record.routers[0].port, cluster.port):
        os.kill(cluster.listening_on(port), signal.SIGKILL)
        until(cluster.answers)
    assert cluster.complete(COPY[0]) == COPY[1]
    assert find_record(cluster.port) == record
    until(lambda: len(cluster.routers()) == 2)
    assert set(cluster.status()) == {"prefill-0", "decode-0", "decode-1"}


def test_a_worker_that_the_operator_drains_stays_away_until_it_is_called_back(cluster: Served) -> None:
    port = ("--port", str(cluster.port))
    assert "drains" in cluster.baton("drain", "prefill-0", "--force", *port)
    until(lambda: any("prefill-0 has drained and stays away" in line for line in cluster.said))
    until(lambda: "prefill-0" not in cluster.status())
    assert cluster.complete(COPY[0]) == COPY[1]
    assert "prefill-0 serves again" in cluster.baton("undrain", "prefill-0", *port)
    assert "prefill-0" in cluster.status()


def events_of(cluster: Served, name: str) -> list[str]:
    """Return the lines of the metrics about events whose names begin so."""
    lines = cluster.get("/metrics").text.splitlines()
    return [line for line in lines if f'event="{name}' in line]


def test_worker_that_is_restarted_hands_its_requests_over_first(cluster: Served) -> None:
    replays = events_of(cluster, "replays_")
    stream = cluster.stream(COPY[0], max_tokens=4000, ignore_eos=True)
    chunks, port = [next(stream)], str(cluster.port)
    reading = threading.Thread(target=lambda: chunks.extend(stream))
    reading.start()
    moved = [cluster.baton("migrate", "--from", f"decode-{index}", "--port", port) for index in (0, 1)]
    assert "1 moved\n" in moved
    before = {name: entry.worker.pid for name, entry in cluster.status().items()}
    for name in ("decode-0", "decode-1"):
        assert f"{name} serves again" in cluster.baton("restart", name, "--port", port)
    after = {name: entry.worker.pid for name, entry in cluster.status().items()}
    assert after.keys() == before.keys()
    assert {name for name in before if before[name] == after[name]} == {"prefill-0"}
    assert "1P1D serves" in cluster.baton("scale", "1P1D", "--port", port)
    reading.join(60)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert events_of(cluster, "migrations") and events_of(cluster, "replays_") == replays
    assert not any("did not end in" in line or "status 143" in line for line in cluster.said)


def test_an_interrupt_before_it_serves_is_told_from_a_cluster_that_has_drained() -> None:
    command = [sys.executable, "-m", "baton", "serve", *SERVE, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "baton: starting tiny on this machine ...\n"
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert errors.endswith("baton: stopping ...\n") and "Traceback" not in errors


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    """A cluster with several of each process, and its cache folder, in which it is alone on this machine.

    No process outlives the parent when that is killed.
    """
    folder = tmp_path_factory.mktemp("cache")
    for kernels in cache_directory().glob("kernels-*.so"):  # or they would be compiled anew
        shutil.copy2(kernels, folder)
    options = ("--gateways", "2", "--routers", "2", "--decode-tp", "2", "--decode-block-size", "64")
    stages = ("--decode-pp", "2", "--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}')
    with served(*SERVE, *options, *stages, "--transport", "tcp", BATON_CACHE_DIR=str(folder)) as found:
        yield found, str(folder)
        pids = descendants(found.process.pid)
        found.process.kill()
        found.process.wait()
        until(lambda: are_gone(pids), 10.0)


def test_several_gateways_routers_stages_and_ranks_serve_behind_one_port(
    several: tuple[Served, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, folder = several
    monkeypatch.setenv("BATON_CACHE_DIR", folder)
    for case in recall_cases(4, 500, seed=4):
        assert cluster.complete(case.prompt, 4) == case.answer
    until(lambda: has_drafts(cluster))
    table = cluster.baton("status", "--port", str(cluster.port))
    assert table.count("Redis is up" if find_program() else "routed") == 2
    for router in find_record(cluster.port).routers:
        pid = cluster.listening_on(router.port)
        os.kill(pid, signal.SIGKILL)
        assert cluster.complete(COPY[0]) == COPY[1]  # the other is asked
        until(lambda: are_gone({pid}) and len(cluster.routers()) == 2)  # noqa: B023


def has_drafts(cluster: Served) -> bool:
    """Return whether a decode worker has computed drafts, after another answer that repeats itself."""
    list(cluster.stream(COPY[0], max_tokens=300, ignore_eos=True))
    return cluster.status()["decode-0"].load.num_draft_tokens > 0


def test_worker_started_by_hand_finds_the_cluster_of_this_machine(
    several: tuple[Served, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, folder = several
    monkeypatch.setenv("BATON_CACHE_DIR", folder)
    command = ("worker", "decode", "tiny", "--name", "extra", "--kv-cache-memory", "64MiB")
    program = [sys.executable, "-m", "baton", *command]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as worker:
        try:
            until(lambda: "extra" in cluster.status())
        finally:
            worker.terminate()
        _, errors = worker.communicate(timeout=60)
    assert worker.returncode == 0
    assert re.search(r"^baton: extra serves at 127\.0\.0\.1:\d+$", errors, re.MULTILINE), errors


def test_a_worker_that_cannot_load_is_told_by_name() -> None:
    command = [sys.executable, "-m", "baton", "serve", *SERVE, "--port", "0"]
    command += ["--kv-cache-memory", "4KiB"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert "the KV cache holds" in result.stderr and "-0: " in result.stderr
