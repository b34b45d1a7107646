"""The serving suite: a server beside another, the control plane alone, and wrong options."""

import json
from pathlib import Path

import pytest

from baton.bench.serve.figures import Run, Sample
from baton.bench.serve.overhead import (
    BATON,
    BEFORE,
    IDLE,
    LIMIT,
    SSE,
    TRACED,
    UNARY,
    cpu_rows,
    limit,
    overhead_rows,
)
from baton.bench.serve.suite import Bars, curves_of, rows_of
from baton.cluster.cli.main import main
from tests.http_answers import Answering, serving


def test_target_and_rival_are_measured_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with limit() as ours, limit() as theirs:
        status = main(
            f"bench serve --target {ours.url} --rival bare={theirs.url} --model m --requests 6 --rounds 2 "
            f"--bar-throughput 0.0001 --output {tmp_path}".split()
        )
    assert status == 0
    output = capsys.readouterr().out
    assert "closed loop, 6 requests, 6 at once" in output
    assert f"kept in {tmp_path}/serve.json\n" in output
    for name in ("baton: output", "bare: output", "baton: ITL p50", "baton / bare: TTFT p50"):
        assert name in output
    kept = json.loads((tmp_path / "serve.json").read_text())
    assert {row["name"]: row["met"] for row in kept["rows"]}["baton / bare: output"] is True
    assert [round["num_ok"] for round in kept["rounds"]["bare"]] == [6, 6]
    assert "api_key" not in kept["options"]
    assert '"TTFT, ms"' in (tmp_path / "serve.html").read_text()
    exported = json.loads((tmp_path / "serve-aiperf.json").read_text())
    assert exported["request_count"] == {"unit": "requests", "avg": 12.0}


def test_open_loop_with_answers_in_one_piece(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with limit() as server:
        main(
            f"bench serve --target {server.url} --model m --requests 5 --rounds 1 --rate 200 --unary "
            f"--goodput ttft:60000 --output {tmp_path}".split()
        )
    output = capsys.readouterr().out
    assert "unary, open loop, 5 requests, 200 a second" in output
    assert "goodput" in output and "lag at worst" in output and "TPOT" not in output


def test_a_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {
            "timestamp": 40 * number,
            "input_length": 600,
            "output_length": 8 * number + 8,
            "hash_ids": [1, number],
        }
        for number in range(6)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with limit() as server:
        main(
            f"bench serve --target {server.url} --model m --trace {trace} --scale 4 --speed 2 --requests 4 "
            f"--rounds 1 --output {tmp_path}".split()
        )
    assert "SSE, open loop, trace.jsonl" in capsys.readouterr().out
    (round,) = json.loads((tmp_path / "serve.json").read_text())["rounds"]["baton"]
    assert round["num_ok"] == 4 and round["duration_s"] >= 3 * 0.04 / 2
    assert round["out_tokens_per_s"] * round["duration_s"] == pytest.approx(2 + 4 + 6 + 8)


@pytest.mark.slow
def test_overhead_measures_the_control_plane_without_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a prefill and a decode worker that compute nothing."""
    options = "--overhead --prefill 1 --policy least-loaded --gateways 2 --rounds 1 --seconds 0.2"
    status = main(["bench", "serve", *options.split(), "--output", str(tmp_path)])
    assert status == 0
    kept = json.loads((tmp_path / "serve-overhead-pd.json").read_text())
    rows = {row["name"]: row for row in kept["rows"]}
    assert rows["answers that do not count"]["value"] == 0
    assert rows["unary, 1 tokens, 16 connections"]["value"] > 0
    assert rows["SSE, 64 tokens, 64 connections"]["value"] > 0
    assert "bare asyncio" in rows["SSE, 64 tokens, 64 connections"]["note"]
    assert rows["prompts by way of prefill workers"]["met"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --target URL, or --overhead"),
        (["--target", "http://h", "--overhead"], "give --target URL, or --overhead"),
        (["--overhead", "--before", "nowhere"], "--before: expected the folder of a Baton checkout"),
        (["--target", "h:80"], "expected http://HOST:PORT"),
        (["--target", "http://127.0.0.1:9"], "lists no model"),
        (["--target", "http://127.0.0.1:9", "--rival", "vllm"], "expected NAME=URL"),
        (["--target", "http://h", "--rate", "0"], "--rate: expected more than 0"),
        (["--target", "http://h", "--rounds", "0"], "expected 1 or more"),
        (["--target", "http://h", "--input", "9-2"], "LOW-HIGH"),
        (["--target", "http://h", "--requsts", "2"], "did you mean --requests"),
    ],
)
def test_invalid_options_are_named(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["bench", "serve", *options])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


class Refusing(Answering):
    """Lists a model of a small vocabulary, and refuses prompts with their largest id."""

    def get(self) -> None:
        self._answer(200, {"data": [{"id": "m", "vocab_size": 9}]})

    def post(self) -> None:
        asked = json.loads(self.body())
        self._answer(400, {"error": {"code": "no", "message": f"the largest is {max(asked['prompt'])}"}})

    def _answer(self, status: int, body: object) -> None:
        self.answer(status, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("handler", "options", "message"),
    [
        # Prompts use the vocabulary that the server lists.
        (Refusing, [], "answers nothing that counts: status 400 no: the largest is 8\n"),
        # It knows no POST.
        (Answering, ["--model", "m"], "baton answers nothing that counts: status 501"),
    ],
)
def test_server_without_a_valid_answer_is_an_error_that_quotes_it(
    handler: type[Answering],
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(handler) as port:
        status = main(["bench", "serve", "--target", f"http://127.0.0.1:{port}", *options])
    assert status == 2
    assert message in capsys.readouterr().err


def a_run(ttft_s: float, num_ok: int = 3, failures: tuple[str, ...] = ()) -> Run:
    samples = [Sample(4, ttft_s, 2 * ttft_s, (ttft_s / 3,) * 3)] * num_ok
    return Run(samples, list(failures), 1.0)


class TestRows:
    def test_a_ratio_is_the_median_of_rounds(self) -> None:
        runs = {"baton": [a_run(0.1), a_run(0.1), a_run(0.1)], "rival": [a_run(0.2), a_run(0.5), a_run(0.4)]}
        rows = {row.name: row for row in rows_of(runs, Bars(throughput=1.0, ttft=0.3))}
        assert rows["baton / rival: TTFT p50"].value == pytest.approx(0.25)
        assert rows["baton / rival: TTFT p50"].met and rows["baton / rival: output"].met
        assert rows["rival: TTFT p50"].value == pytest.approx(400)

    def test_failures_are_a_bar_that_is_missed(self) -> None:
        run = a_run(0.1, failures=("late", "late"))._replace(said="come again")
        (failed, *_) = rows_of({"baton": [a_run(0.1), run]}, Bars())
        assert failed.met is False and failed.value == 2 and failed.note == "2 x late: come again"

    def test_ratio_to_a_target_without_answers_fails(self) -> None:
        rows = rows_of({"baton": [a_run(0.1)], "rival": [a_run(0.1, num_ok=0)]}, Bars())
        assert rows[-1].value is None and rows[-1].met is False


def test_bars_of_the_overhead_are_at_the_most_connections() -> None:
    sample = Sample(64, 0.001, 0.002, (0.001,) * 63)
    hammered = [Run([sample] * 60_000, [], 64.0)]
    results = {(name, point): hammered for name in (BATON, LIMIT) for point in (IDLE, *UNARY, *SSE)}
    rows = {row.name: row for row in overhead_rows(results, [BATON, LIMIT])}
    assert rows[SSE[-1].name].met and rows[SSE[-1].name].value == 60_000
    assert rows[SSE[0].name].met is None
    assert rows["TTFT p50, idle, of a model that takes no time"].value == pytest.approx(1.0)
    assert "bare asyncio 60,000 (100%)" in rows[SSE[0].name].note


def test_cpu_time_is_compared_with_the_checkout_before() -> None:
    sample = Sample(1, 0.001, 0.001, ())
    ours = [Run([sample] * 10, [], 1.0, cpu_s=cpu_s) for cpu_s in (0.011, 0.010, 0.9)]
    before = [Run([sample] * 20, [], 1.0, cpu_s=cpu_s) for cpu_s in (0.020, 0.019, 0.021)]
    (row,) = cpu_rows({(BATON, IDLE): ours, (BEFORE, IDLE): before})
    assert row.value == pytest.approx(1.1) and row.met is False
    assert row.note.endswith("; mean of the rounds 29.289 +- 28.213")
    assert cpu_rows({(BATON, IDLE): ours}) == []
    with_traces = {(BATON, IDLE): before, (TRACED, IDLE): ours, (BEFORE, IDLE): before}
    assert [row.value for row in cpu_rows(with_traces)] == [1.0, pytest.approx(1.1)]
    del with_traces[BEFORE, IDLE]
    assert [row.name for row in cpu_rows(with_traces)] == [f"CPU time, traced: {IDLE.name}"]
    assert cpu_rows({(BATON, IDLE): ours[:1], (BEFORE, IDLE): [Run([], ["late"], 1.0)]}) == []


def test_curves_have_no_zero_and_skip_latencies_of_answers_in_one_piece() -> None:
    curves = curves_of({"baton": [Run([Sample(1, 0.2, 0.2, ())], [], 1.0)]})
    assert curves["TTFT, ms"]["baton"] == [(200.0, 1.0)] and not curves["ITL, ms"]["baton"]
    at_once = curves_of({"baton": [Run([Sample(3, 0.2, 0.2, (0.0, 0.0))], [], 1.0)]})
    assert at_once["ITL, ms"]["baton"] == [(0.001, 0.5), (0.001, 1.0)]
