"""The KV suite with little work: every subject gives a rate, and each figure has its limit beside it."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from baton.bench.kv import limits, suite
from baton.bench.kv.limits import Rival, scattered_moves
from baton.bench.kv.suite import Point, rival_rows, sweep_rows
from baton.bench.report import Report, Row
from baton.kvtransfer.protocol.handoff import TransferTimes
from tests.layouts import a_layout

LITTLE = 2**22
TIMES = TransferTimes(
    total_s=0.01,
    moving_s=1.0,
    verify_s=0.003,
    exposed_s=0.009,
    num_bytes=2**24,
)
LIMITS = {
    "memcpy": 10.0,
    "raw socket": 4.0,
    "raw socket x2": 5.0,
    "raw socket x2, unpaced": 8.0,
    "isend/irecv pages": 2.0,
    "memcpy, 512 tokens": 8.0,
    "raw socket, 512 tokens": 2.0,
}


def point(transport: str, num_tokens: int, gbps: float) -> Point:
    num_bytes = num_tokens * 2**12
    times = msgspec.structs.replace(TIMES, num_bytes=num_bytes, moving_s=num_bytes / gbps / 1e9)
    return Point(num_tokens, transport, times)


def verdicts(rows: Sequence[Row]) -> dict[str, tuple[object, bool | None]]:
    return {row.name: (pytest.approx(row.value), row.met) for row in rows if row.limit is not None}


def command(script: str, *arguments: str) -> str:
    return shlex.join([sys.executable, "-c", script, *arguments])


def run(folder: Path, *words: str) -> dict[str, Row]:
    """Run the suite as a command; return its rows by name."""
    options = ["--shapes", "tiny", "--rounds", "1", "--output", str(folder), *words]
    suite.measure.main(None, options)
    (path,) = folder.glob("*.json")
    return {row["name"]: Row(**row) for row in json.loads(path.read_text())["rows"]}


@pytest.mark.slow
def test_sweep_has_every_transport_limit_and_rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LIMIT_BYTES", LITTLE)
    told = command("import sys; print('{\"write\": ' + sys.argv[1] + '}')", "{num_pages}")
    sizes = ("--sizes", "100", "512", "--stream-tokens")
    rows = run(tmp_path, *sizes, "--rival", f"tcp:other={told}")
    page_bytes = a_layout(num_layers=4, head_dim=64, dtype="bfloat16").page_bytes
    assert rows["other: write"].value == LITTLE / page_bytes
    for transport in ("shm", "tcp"):
        for name in ("100 tokens", "512 tokens"):
            assert rows[f"{transport}: {name}"].value
    assert {f"limit: {name}" for name in LIMITS} <= set(rows)


@pytest.mark.slow
def test_streamed_prompt_has_a_share_and_a_gain() -> None:
    exposed, gain, by_layers = suite.stream_rows(600, "shm", 1, Report("kv", "kv", Path()))
    assert (exposed.limit, gain.limit, by_layers.limit) == ("<= 3", ">= 3", None)
    assert exposed.value and gain.value and by_layers.value


@pytest.mark.parametrize("num_pages", [1, 40, 5000])
def test_pages_of_a_limit_are_scattered_within_its_pool(num_pages: int) -> None:
    moves = scattered_moves(2**15, num_pages)
    for pages in (moves.source_pages, moves.destination_pages):
        assert len(set(pages)) == num_pages and 0 <= min(pages) <= max(pages) < moves.num_pool_pages
    assert moves.num_bytes == num_pages * 2**15


def test_largest_transfer_is_compared_with_the_limit_of_as_many_streams() -> None:
    points = [
        point("shm", 512, 5.0),
        point("shm", 8192, 9.5),
        point("tcp", 512, 3.0),
        point("tcp", 8192, 4.0),
    ]
    rows = sweep_rows(points, LIMITS)
    assert verdicts(rows) == {
        "shm / memcpy": (0.95, True),
        "shm / gloo, same pages": (4.75, True),
        "shm: 512 tokens / largest": (5.0 / 9.5, False),
        "tcp / raw socket x2": (0.8, False),
        "tcp / gloo, same pages": (2.0, True),
        "tcp: 512 tokens / largest": (0.75, True),
    }
    by_name = {row.name: row for row in rows}
    assert by_name["tcp / raw socket x2, unpaced"].value == pytest.approx(0.5)
    assert by_name["shm: 512 tokens / largest"].note == "memcpy of as few bytes: 0.84"
    assert by_name["shm: 512 tokens / memcpy of as few"].value == pytest.approx(0.625)


def test_rival_is_compared_with_the_largest_transfer_of_its_transport() -> None:
    points = [point("shm", 512, 4.0), point("shm", 8192, 12.0), point("tcp", 8192, 3.0)]
    said = {
        "shm:nixl over shm": '{"write": 8, "read": 24}',
        "tcp:mooncake": '{"write": 2}',
        "tcp:unheard-of": '{"write": 6}',
        "tcp:broken": "it broke",
    }
    rivals = [Rival(f"{name}=" + command(f"print({text!r})")) for name, text in said.items()]
    for rival in rivals:
        rival.run(scattered_moves(4096, 3))
    rows = {row.name: row for row in rival_rows(points, rivals)}
    assert verdicts(list(rows.values())) == {
        "shm / nixl over shm: write": (1.5, True),
        "tcp / mooncake: write": (1.5, False),
    }
    assert rows["nixl over shm: read"].value == 24.0
    assert rows["tcp / unheard-of: write"].value == pytest.approx(0.5)
    assert (rows["broken"].value, rows["broken"].met) == (None, False) and "it broke" in rows["broken"].note
