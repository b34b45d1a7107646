"""Traces in the formats of Mooncake, Azure and Baton, and synthetic ones."""

import math
import time
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.messages.control import Ended, Started
from baton.messages.workers import WorkerRole
from baton.request import HEALTH_PRIORITY, TokenIds
from baton.router.recording import Recording
from baton.sim.replay import frame_chunks
from baton.sim.timed.fast import FastCluster
from baton.sim.timed.fleet import ClientCall, Fleet
from baton.sim.timed.times import Machine
from baton.sim.timed.workload import Lengths, TraceRequest, page_keys, read_trace, synthetic, tokens_of
from tests.node_peers import a_request, id_of
from tests.unit.router.router_cluster import Cluster, cluster

LENGTH_NAMES = ("input_tokens", "output_tokens")
MOONCAKE = """\
{"timestamp": 3000, "input_length": 700, "output_length": 40, "hash_ids": [0, 7]}
{"timestamp": 0, "input_length": 1024, "output_length": 64, "hash_ids": [0, 1]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.4799600,3180,8
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_mooncake_lines_come_in_order_of_arrival(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, "trace.jsonl", MOONCAKE))
    assert (first.arrival_s, first.input_tokens, first.output_tokens) == (0.0, 1024, 64)
    assert (second.arrival_s, second.block_ids, second.block_tokens) == (3.0, (0, 7), 512)


def test_azure_times_count_from_the_first_row(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, "trace.csv", AZURE))
    assert (first.arrival_s, first.input_tokens, first.block_ids) == (0.0, 4808, ())
    assert second.arrival_s == pytest.approx(0.5)


def test_azure_times_do_not_depend_on_the_time_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Berlin's clocks skip one of these two hours."""
    rows = AZURE.splitlines()[0], "2024-03-31 01:30:00.0000000,100,10", "2024-03-31 03:30:00.0000000,100,10"
    with monkeypatch.context() as berlin:
        berlin.setenv("TZ", "Europe/Berlin")
        time.tzset()
        first, second = read_trace(written(tmp_path, "trace.csv", "\n".join(rows) + "\n"))
    time.tzset()
    assert second.arrival_s - first.arrival_s == 7200.0


def test_scale_divides_lengths_and_blocks(tmp_path: Path) -> None:
    (first,) = read_trace(written(tmp_path, "trace.jsonl", MOONCAKE), scale=32, limit=1)
    assert (first.input_tokens, first.output_tokens, first.block_tokens) == (32, 2, 16)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace.jsonl", '{"timestamp": 0}\n', "line 1.*input_length"),
        ("trace.jsonl", MOONCAKE + "nonsense\n", "line 3"),
        ("trace.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,5\n", "line 2.*GeneratedTokens"),
        ("trace.csv", AZURE + "yesterday,1,1\n", "line 4"),
    ],
)
def test_a_line_of_another_format_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(written(tmp_path, name, text))


def test_missing_file_and_bad_scale_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="scale"):
        read_trace(written(tmp_path, "trace.csv", AZURE), scale=0)


def test_synthetic_lengths_and_arrivals_are_as_asked_for() -> None:
    lengths = Lengths.parse("400-1600,64-256,0.8")
    trace = synthetic(50.0, 100.0, lengths, seed=3)
    assert len(trace) == pytest.approx(5000, rel=0.06)
    inputs, outputs = (np.array([getattr(each, name) for each in trace]) for name in LENGTH_NAMES)
    assert np.percentile(inputs, (50, 90)) == pytest.approx((400, 1600), rel=0.08)
    assert np.percentile(outputs, (50, 90)) == pytest.approx((64, 256), rel=0.08)
    assert np.corrcoef(np.log(inputs), np.log(outputs))[0, 1] == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("text", ["", "400", "400-100,1-2", "1-2,3-4,1.5", "1-2,3-4,0,1", "a-b,c-d"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="P50-P90"):
        Lengths.parse(text)


@pytest.mark.parametrize(
    ("rate", "seconds"), [(0.0, 10.0), (-1.0, 10.0), (math.nan, 10.0), (1.0, math.inf), (1.0, math.nan)]
)
def test_load_that_never_comes_or_never_ends_is_refused(rate: float, seconds: float) -> None:
    with pytest.raises(ConfigError, match="expected a rate of more than 0 requests/s for a finite time"):
        synthetic(rate, seconds, Lengths.parse("400-1600,64-256"))


def test_keys_of_pages_are_alike_where_prompts_are() -> None:
    def keys(*blocks: int) -> list[bytes]:
        traced = TraceRequest(
            arrival_s=0, input_tokens=100, output_tokens=1, block_ids=blocks, block_tokens=32
        )
        joined = page_keys(traced, 16, 0)
        return [joined[at : at + 8] for at in range(0, len(joined), 8)]

    one, other = keys(1, 2, 3, 4), keys(1, 2, 9, 4)
    assert len(one) == 6 == len(set(one))
    assert one[:4] == other[:4] and one[4] != other[4]
    assert not set(keys(2, 1, 3, 4)) & set(one[:4])


def test_prompts_without_ids_share_nothing_even_at_one_moment() -> None:
    alone = TraceRequest(arrival_s=0.0, input_tokens=64, output_tokens=1)
    keys = [page_keys(alone, 16, number) for number in range(3)]
    assert len({key[at : at + 8] for key in keys for at in range(0, 32, 8)}) == 12
    tokens = [tokens_of(alone, number)[:16] for number in range(3)]
    assert len(set(tokens)) == 3


def bundled(path: Path, *recordings: Recording) -> list[TraceRequest]:
    with zipfile.ZipFile(path, "w") as archive:
        for number, recording in enumerate(recordings):
            archive.writestr(f"routers/{number:032x}/recording", frame_chunks(recording.chunks()))
    return read_trace(path)


def recorded(date_s: float) -> tuple[Cluster, Recording]:
    """A router that is recorded from this date on."""
    c, recording = cluster("p0", "d0", "d1", policy="cost"), Recording(900.0, 2**26, lambda: date_s)
    c.router.record(recording)
    return c, recording


def test_routers_of_a_bundle_have_one_time_and_one_set_of_prefixes(tmp_path: Path) -> None:
    (one, first), (other, second) = recorded(1.8e9), recorded(1.8e9 + 0.5)
    one.submit(a_request("a", 40))
    other.submit(a_request("b", 40))
    other.submit(msgspec.structs.replace(a_request("c", 40), token_ids=TokenIds.of(range(1000, 1040))))
    trace = bundled(tmp_path / "incident.zip", first, second)
    assert [each.arrival_s for each in trace] == [0.0, 0.5, 0.5]
    alike, also, unlike = (each.block_ids for each in trace)
    assert alike[:2] == also[:2] and alike[2] != also[2]
    assert not set(unlike) & {*alike, *also}


def test_answer_of_several_attempts_has_the_tokens_of_all(tmp_path: Path) -> None:
    c, recording = recorded(1.8e9)
    request = a_request("a", 40)
    c.submit(request)
    c["g"].say(Ended(attempts=((id_of("a"), 0),), num_tokens=(5,)))
    c.submit(msgspec.structs.replace(request, attempt=1, generated_token_ids=(1,) * 5))
    c["g"].say(Ended(attempts=((id_of("a"), 1),), num_tokens=(2,)))
    (traced,) = bundled(tmp_path / "incident.zip", recording)
    assert (traced.input_tokens, traced.output_tokens) == (40, 7)
    assert len(tokens_of(traced, 0)) == 40


def test_health_checks_of_a_bundle_are_no_requests(tmp_path: Path) -> None:
    c, recording = recorded(1.8e9)
    c.submit(a_request("health", 2, priority=HEALTH_PRIORITY))
    c.submit(a_request("a", 40))
    (traced,) = bundled(tmp_path / "incident.zip", recording)
    assert traced.input_tokens == 40


def test_bundle_of_a_router_is_a_trace(tmp_path: Path) -> None:
    fleet = Fleet(num_prefill=1, num_decode=1, decode_keeps=True)
    fast = FastCluster(RouterConfig(), fleet, dict.fromkeys(WorkerRole, Machine()))
    recording = Recording(900.0, 2**26, lambda: 1.8e9)
    fast.router.record(recording)
    fast.run(
        ClientCall(at_s=1.0 + at, token_ids=(*range(64), *[at] * 40), num_answered=3 + at) for at in range(4)
    )
    trace = bundled(tmp_path / "incident.zip", recording)
    assert [each.arrival_s for each in trace] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert [(each.input_tokens, each.output_tokens) for each in trace] == [(104, 3 + at) for at in range(4)]
    shared = [
        set(page_keys(each, 16, number)[at : at + 8] for at in range(0, 48, 8))
        for number, each in enumerate(trace[:2])
    ]
    assert len(shared[0] & shared[1]) == 4


def logged(path: Path, num_known: int = 2) -> Cluster:
    """Write a log of three requests, of which two end. num_known: ends that tell the tokens of answers."""
    c = cluster("p0", "d0", "d1", policy="cost")
    with path.open("wb") as file:
        c.router.log_to(file.write)
        c.submit(a_request("a", 40))
        c.clock.advance(1.0)
        c["g"].say(Started(attempts=((id_of("a"), 0),)))
        c.submit(a_request("b", 50))
        c.clock.advance(2.0)
        c["g"].say(Ended(attempts=((id_of("a"), 0), (id_of("b"), 0)), num_tokens=(40, 0)[:num_known]))
        c.submit(a_request("c", 50))
    return c


def test_requests_come_when_they_came_with_what_they_shared(tmp_path: Path) -> None:
    logged(tmp_path / "log")
    one, other, last = read_trace(tmp_path / "log")
    assert (one.arrival_s, other.arrival_s, last.arrival_s) == (0.0, 1.0, 3.0)
    assert (one.input_tokens, other.input_tokens, one.block_tokens) == (40, 50, 16)
    assert one.block_ids[:2] == other.block_ids[:2] and one.block_ids[2] != other.block_ids[2]
    assert (one.output_tokens, other.output_tokens) == (40, 1)  # it ended before its first token
    assert last.output_tokens == 8  # its limit: it has not ended


def test_logged_answer_of_several_attempts_has_the_tokens_of_all(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        c = cluster("p0", "d0", "d1", policy="cost")
        c.router.log_to(file.write)
        request = a_request("a", 40)
        c.submit(request)
        c["g"].say(Ended(attempts=((id_of("a"), 0),), num_tokens=(5,)))
        c.submit(msgspec.structs.replace(request, attempt=1, generated_token_ids=(1,) * 5))
        c["g"].say(Ended(attempts=((id_of("a"), 1),), num_tokens=(2,)))
    (traced,) = read_trace(tmp_path / "log")
    assert traced.output_tokens == 7


def test_logged_requests_whose_ends_tell_no_tokens_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logged(tmp_path / "log", num_known=1)
    assert [each.arrival_s for each in read_trace(tmp_path / "log")] == [0.0, 3.0]
    assert "left out" in caplog.text
    logged(tmp_path / "old", num_known=0)
    lines = (tmp_path / "old").read_bytes().splitlines(keepends=True)
    (tmp_path / "old").write_bytes(b"".join(lines[:-1]))  # without the request that has not ended
    with pytest.raises(ConfigError, match="no end in it tells the tokens"):
        read_trace(tmp_path / "old")


def test_line_that_was_cut_off_is_left_out_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logged(path)
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    assert len(read_trace(path)) == 2
    path.write_bytes(b"{}\n" + content)
    with pytest.raises(ConfigError, match="line 1"):
        read_trace(path)


def test_log_of_ends_alone_is_refused(tmp_path: Path) -> None:
    logged(tmp_path / "log")
    (tmp_path / "ends").write_bytes((tmp_path / "log").read_bytes().splitlines(keepends=True)[-2])
    with pytest.raises(ConfigError, match="no request"):
        read_trace(tmp_path / "ends")


def test_equal_blocks_are_equal_tokens() -> None:
    one, other = (
        tokens_of(
            TraceRequest(arrival_s=0, input_tokens=40, output_tokens=1, block_ids=blocks, block_tokens=16), 0
        )
        for blocks in ((1, 2, 3), (1, 2, 4))
    )
    assert one[:32] == other[:32] and one[32:] != other[32:]
    assert len(one) == 40
