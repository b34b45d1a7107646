from pathlib import Path

import numpy as np
import pytest

from baton.bench.router.decision import decision_times_us, main
from baton.bench.router.prefix_index import load


def test_each_decision_is_timed() -> None:
    rng = np.random.default_rng(0)
    times_us = decision_times_us(load(40, 20_000, rng), 50, rng)
    assert len(times_us) == 50 and min(times_us) > 0


def test_figures_are_shown_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pages", "50000", "--workers", "20", "--decisions", "20", "--json", str(tmp_path / "j")]
    main(words)
    assert "decision, 20 workers: p50" in capsys.readouterr().out
    assert "decision, 4 workers: p99" in (tmp_path / "j").read_text()
