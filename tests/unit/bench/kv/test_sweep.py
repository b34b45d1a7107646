"""The parts of the KV bench that move pages, with little work: every subject gives a rate, and ends."""

import shlex
import sys

import pytest

from baton.bench.kv import sweep
from baton.bench.kv.limits import UNPACED, Rival
from baton.bench.kv.sweep import SMALL, TRANSPORTS, Rounds, limit_moves, measure_relayout, measure_shape
from baton.pages import PageLayout

LITTLE = 2**22


def say_nothing(text: str) -> None:
    """Show no progress."""


@pytest.mark.parametrize("num_pages", [1, 40, 5000])
def test_pages_of_a_limit_are_scattered_within_its_pool(num_pages: int) -> None:
    moves = limit_moves(2**15, num_pages)
    for pages in (moves.source_pages, moves.destination_pages):
        assert len(set(pages)) == num_pages and 0 <= min(pages) <= max(pages) < moves.num_pool_pages
    assert moves.num_bytes == num_pages * 2**15


def test_a_sweep_has_every_transport_limit_and_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "LIMIT_BYTES", LITTLE)
    told = "import sys; print('{\"write\": ' + sys.argv[1] + '}')"
    rival = Rival("tcp", "other", shlex.join([sys.executable, "-c", told, "{num_pages}"]))
    found = measure_shape("tiny", 16, Rounds((100, 512), 1, [rival]), say_nothing)
    assert {(point.transport, point.num_tokens) for point in found.points} == {
        (transport, num_tokens) for transport in TRANSPORTS for num_tokens in (100, 512)
    }
    page_bytes = PageLayout(
        tp_size=1, page_size=16, num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16"
    ).page_bytes
    assert all(point.num_bytes == -(-point.num_tokens // 16) * page_bytes for point in found.points)
    limits = found.limits.gbps
    assert {"memcpy", "raw socket", "raw socket x2", "raw socket x2" + UNPACED, "isend/irecv pages"} < set(
        limits
    )
    assert {"memcpy" + SMALL, "raw socket" + SMALL} < set(limits)
    assert min(limits.values()) > 0 and min(point.gbps for point in found.points) > 0
    assert found.rivals == [("tcp", "other", {"write": LITTLE / page_bytes}, "")]


def test_pages_go_into_pages_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "LIMIT_BYTES", LITTLE)
    relaid = measure_relayout("tiny", 16, 8, 1, say_nothing)
    assert [each.transport for each in relaid] == list(TRANSPORTS)
    for each in relaid:
        assert each.run_bytes == 8 * 64 * 2  # of one head
        assert min(each.gbps, each.equal_gbps, each.memcpy_gbps) > 0
