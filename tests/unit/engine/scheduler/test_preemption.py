import pytest

from baton.engine.scheduler.plan import PreemptMode
from baton.engine.scheduler.preemption import PreemptionRates, cheaper_mode


def test_without_measured_rates_preemption_recomputes() -> None:
    assert cheaper_mode(10_000, 1, None) is PreemptMode.RECOMPUTE


@pytest.mark.parametrize(
    ("num_tokens", "num_pages", "expected"),
    [
        (160, 10, PreemptMode.SWAP),  # 1.6 s against 2 * 10 * 0.05 = 1.0 s
        (90, 10, PreemptMode.RECOMPUTE),  # 0.9 s against 1.0 s
        (100, 10, PreemptMode.RECOMPUTE),  # a tie
    ],
)
def test_the_cheaper_mode_wins(num_tokens: int, num_pages: int, expected: PreemptMode) -> None:
    rates = PreemptionRates(recompute_s_per_token=0.01, swap_s_per_page=0.05)
    assert cheaper_mode(num_tokens, num_pages, rates) is expected
