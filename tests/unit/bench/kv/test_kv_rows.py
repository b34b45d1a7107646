"""The rows of the KV suite, and their limits."""

from baton.bench.kv.cases import Fault, Replayed, Streamed
from baton.bench.kv.limits import RivalRates
from baton.bench.kv.suite import fault_rows, relayout_rows, rival_rows, stream_rows, sweep_rows, trace_rows
from baton.bench.kv.sweep import Limits, Point, Relaid
from baton.bench.report import Row
from baton.kvtransfer.protocol.handoff import TransferTimes

TIMES = TransferTimes(
    total_s=0.01,
    handshake_s=0.0,
    gather_s=0.001,
    wire_s=0.005,
    waiting_s=0.0,
    verify_s=0.003,
    exposed_s=0.009,
    num_bytes=2**24,
    num_messages=2,
)
LIMITS = Limits(
    "tiny",
    16,
    {
        "memcpy": 10.0,
        "raw socket": 4.0,
        "raw socket x2": 5.0,
        "raw socket x2, unpaced": 8.0,
        "isend/irecv pages": 2.0,
        "memcpy, 512 tokens": 8.0,
        "raw socket, 512 tokens": 2.0,
    },
)


def point(transport: str, num_tokens: int, gbps: float) -> Point:
    return Point("tiny", 16, num_tokens, transport, num_tokens * 2**12, gbps, gbps / 2, TIMES)


def verdicts(rows: list[Row]) -> dict[str, tuple[float | None, bool | None]]:
    return {row.name: (row.value, row.met) for row in rows if row.limit is not None}


def test_the_largest_transfer_is_set_against_the_limit_with_as_many_streams() -> None:
    points = [
        point("shm", 512, 5.0),
        point("shm", 8192, 9.5),
        point("tcp", 512, 3.0),
        point("tcp", 8192, 4.0),
    ]
    assert verdicts(sweep_rows(points, LIMITS)) == {
        "shm / memcpy": (0.95, True),
        "shm / gloo, same pages": (4.75, True),
        "shm: 512 tokens / largest": (5.0 / 9.5, False),
        "tcp / raw socket x2": (0.8, False),
        "tcp / gloo, same pages": (2.0, True),
        "tcp: 512 tokens / largest": (0.75, True),
    }


def test_a_short_prompt_is_set_against_as_few_bytes_without_a_transport() -> None:
    points = [point("shm", 512, 4.0), point("shm", 8192, 10.0), point("tcp", 8192, 4.0)]
    rows = {row.name: row for row in sweep_rows(points, LIMITS)}
    assert rows["shm: 512 tokens / largest"].note == "memcpy of as few bytes: 0.80"
    assert rows["shm: 512 tokens / memcpy of as few"].value == 0.5


def test_tcp_is_set_against_sockets_that_do_not_pace_too() -> None:
    rows = {row.name: row for row in sweep_rows([point("shm", 8192, 10.0), point("tcp", 8192, 4.0)], LIMITS)}
    unpaced = rows["tcp / raw socket x2, unpaced"]
    assert (unpaced.value, unpaced.met) == (0.5, None)


def test_a_rival_is_set_against_the_largest_transfer_of_its_transport() -> None:
    points = [point("shm", 512, 4.0), point("shm", 8192, 12.0), point("tcp", 8192, 3.0)]
    rivals = [
        RivalRates("shm", "nixl over shm", {"write": 8.0, "read": 24.0}),
        RivalRates("tcp", "mooncake", {"write": 2.0}),
        RivalRates("tcp", "unheard-of", {"write": 6.0}),
        RivalRates("tcp", "broken", {}, "it broke"),
    ]
    rows = {row.name: row for row in rival_rows(points, rivals)}
    assert verdicts(list(rows.values())) == {
        "shm / nixl over shm: write": (1.5, True),
        "tcp / mooncake: write": (1.5, False),
    }
    assert rows["nixl over shm: read"].value == 24.0 and rows["shm / nixl over shm: read"].value == 0.5
    assert rows["tcp / unheard-of: write"].value == 0.5
    assert (rows["broken"].value, rows["broken"].met, rows["broken"].note) == (None, False, "it broke")


def test_another_page_size_is_set_against_as_short_runs_and_against_equal_pages() -> None:
    relaid = Relaid("tiny", 16, 8, "tcp", 1024, gbps=3.0, equal_gbps=4.0, memcpy_gbps=6.0)
    rows = {row.name: row.value for row in relayout_rows([relaid])}
    name = "tiny, tcp: pages of 16 into 8"
    assert rows == {name: 3.0, f"{name} / memcpy of such runs": 0.5, f"{name} / into equal pages": 0.75}


def test_streaming_has_a_share_and_a_gain() -> None:
    streamed = Streamed(
        4096,
        "shm",
        prefill_s=2.0,
        exposed_streaming_s=0.01,
        exposed_at_end_s=0.02,
        prefill_by_layers_s=2.02,
        exposed_by_layers_s=0.004,
    )
    rows = stream_rows([streamed])
    assert (rows[-1].value, rows[-1].note) == (2.5, "4.0 ms; the prefill takes +1.0 %")
    assert verdicts(rows) == {
        "shm, 4,096 tokens: exposed": (0.5, True),
        "shm, 4,096 tokens: pushed at the end / streamed": (2.0, False),
    }


def test_pages_are_due_back_a_second_after_a_fault_is_noticed() -> None:
    slow = Fault("kill", "tcp", 50, "failed", detected_s=0.5, pages_back_s=2.0, wasted_bytes=2**20)
    noticed, back = fault_rows([slow])
    assert (noticed.value, noticed.note) == (500.0, "failed; 1.0 MiB for nothing")
    assert (back.value, back.met) == (1500.0, False)


def test_a_replay_has_no_bars() -> None:
    replayed = Replayed("shm", 10, 2**30, 512, 5.0, 1.0, 2.0, 0.9, 0.1)
    rows = trace_rows([replayed])
    assert all(row.met is None for row in rows)
    assert rows[-1].value == 10.0
