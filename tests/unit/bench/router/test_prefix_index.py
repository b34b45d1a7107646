from pathlib import Path

import pytest

from baton.bench.router.prefix_index import measure


def test_lookups_and_decisions_are_timed_in_clusters_of_both_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--pages", "50000", "--workers", "20", "--matches", "20"]
    measure.main(None, [*words, "--output", str(tmp_path)])
    table = capsys.readouterr().out
    for row in ("match of 752 pages, p99", "decision, 20 workers: p50", "decision, 4 workers: p99", "memory"):
        assert row in table
    assert "decision, 4 workers: p99" in (tmp_path / "prefix_index.json").read_text()
