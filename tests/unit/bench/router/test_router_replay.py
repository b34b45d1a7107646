"""A router's decision log is replayed as it came."""

from pathlib import Path

import pytest

from baton.bench.report import run_command
from baton.bench.router.suite import add_options, read_log, run
from baton.errors import ConfigError
from baton.messages.control import Ended, Started
from tests.node_peers import a_request, id_of
from tests.unit.router.router_cluster import Cluster, cluster


def logged(path: Path) -> Cluster:
    c = cluster("p0", "d0", "d1", policy="cost")
    with path.open("wb") as file:
        c.router.cluster_state.log_to(file.write)
        c.submit(a_request("a", 40))
        c.clock.advance(1.0)
        c["g"].say(Started(attempts=((id_of("a"), 0),)))
        c.submit(a_request("b", 50))
        c.clock.advance(2.0)
        c["g"].say(Ended(attempts=((id_of("a"), 0), (id_of("b"), 0))))
    return c


def test_requests_come_when_they_came_with_what_they_shared(tmp_path: Path) -> None:
    logged(tmp_path / "log")
    log = read_log(tmp_path / "log", step_s=0.1)
    one, other = log.trace
    assert (one.arrival_s, other.arrival_s) == (0.0, 1.0)
    assert (one.input_tokens, other.input_tokens, log.page_size) == (40, 50, 16)
    assert one.block_ids[:2] == other.block_ids[:2] and one.block_ids[2] != other.block_ids[2]
    assert one.output_tokens == 20  # 2 s after its first token
    assert other.output_tokens == 8  # it never had one, and 8 was its limit
    assert (log.num_prefill, log.num_decode, log.ttft_mean_s) == (1, 2, 1.0)


def test_line_that_was_cut_off_is_left_out_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logged(path)
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    assert len(read_log(path, step_s=0.1).trace) == 2
    path.write_bytes(b"{}\n" + content)
    with pytest.raises(ConfigError, match="line 1"):
        read_log(path, step_s=0.1)


def test_log_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"")
    with pytest.raises(ConfigError, match="no request"):
        read_log(tmp_path / "log", step_s=0.1)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_log(tmp_path / "none", step_s=0.1)


def test_log_is_replayed_under_other_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged(tmp_path / "log")
    words = ["--replay", str(tmp_path / "log"), "--policy", "prefix", "--output", str(tmp_path)]
    run_command(None, add_options, run, words)
    table = capsys.readouterr().out
    for row in ("as it was: TTFT mean", "prefix: TTFT mean", "round-robin: hit", "cost: mean latency"):
        assert row in table
    assert "prefix: TTFT mean" in (tmp_path / "router.json").read_text()
