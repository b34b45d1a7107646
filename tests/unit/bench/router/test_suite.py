"""The router's suite: the worth of policies in a rehearsal, and decision logs that are replayed."""

from pathlib import Path

import pytest

from baton.bench.router.suite import WORKLOADS, documents, measure, run_trace, spread, up_to
from baton.errors import ConfigError
from baton.messages.control import Ended, Started
from baton.sim.timed.fleet import Fleet
from baton.sim.timed.workload import TraceRequest, read_log, tokens_of
from tests.node_peers import a_request, id_of
from tests.unit.router.router_cluster import Cluster, cluster

SMALL = Fleet(num_prefill=2, num_decode=2, num_prefill_pages=4000, decode_keeps=True)


def test_equal_blocks_are_equal_tokens() -> None:
    one, other = (
        tokens_of(
            TraceRequest(arrival_s=0, input_tokens=40, output_tokens=1, block_ids=blocks, block_tokens=16), 0
        )
        for blocks in ((1, 2, 3), (1, 2, 4))
    )
    assert one[:32] == other[:32] and one[32:] != other[32:]
    assert len(one) == 40


def test_spread_requests_stay_in_their_bin_and_in_order() -> None:
    burst = [TraceRequest(arrival_s=3.0, input_tokens=1, output_tokens=1) for _ in range(3)]
    assert [each.arrival_s for each in spread(burst)] == [3.5, 4.5, 5.5]


def test_run_is_the_same_for_the_same_seed() -> None:
    trace = documents(40, seed=3)
    one, other = (run_trace(trace, "cost", seed=1, fleet=SMALL, scale=1.0) for _ in range(2))
    assert one == other


def test_cost_finds_shared_documents_and_round_robin_does_not() -> None:
    trace = documents(80, seed=1)
    cost, turns = (
        run_trace(trace, policy, fleet=Fleet(num_prefill_pages=4000), scale=1.0)
        for policy in ("cost", "round-robin")
    )
    assert cost.hit > 1.5 * turns.hit
    assert cost.ttft_mean_s < 0.7 * turns.ttft_mean_s


def test_threshold_alone_says_what_is_computed_locally() -> None:
    trace = documents(40, seed=2)
    for threshold, num_local in ((0, 0), (2**30, 40)):
        result = run_trace(trace, "cost", fleet=SMALL, scale=1.0, select=up_to(threshold))
        assert result.counters["computed_locally"] == num_local


@pytest.mark.parametrize("name", WORKLOADS)
def test_made_workloads_are_in_order_and_of_the_length_asked_for(name: str) -> None:
    trace = WORKLOADS[name](50, 2)
    arrivals_s = [each.arrival_s for each in trace]
    assert len(trace) == 50 and arrivals_s == sorted(arrivals_s)
    assert all(each.input_tokens <= len(each.block_ids) * each.block_tokens for each in trace)


def logged(path: Path) -> Cluster:
    c = cluster("p0", "d0", "d1", policy="cost")
    with path.open("wb") as file:
        c.router.log_to(file.write)
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
    measure.main(None, words)
    table = capsys.readouterr().out
    for row in ("as it was: TTFT mean", "prefix: TTFT mean", "round-robin: hit", "cost: mean latency"):
        assert row in table
    assert "prefix: TTFT mean" in (tmp_path / "router.json").read_text()
