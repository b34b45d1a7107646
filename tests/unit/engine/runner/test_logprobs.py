import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.runner import sampler
from baton.engine.runner.sampler import token_logprobs


@given(
    num_rows=st.integers(0, 9), vocab_size=st.integers(1, 40), num_top=st.integers(0, 45), tied=st.booleans()
)
def test_logprob_rank_and_alternatives_agree_with_log_softmax(
    num_rows: int, vocab_size: int, num_top: int, tied: bool
) -> None:
    logits = torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(num_rows)) * 3
    logits = logits.round() if tied else logits
    token_ids = [row * 7 % vocab_size for row in range(num_rows)]
    rows = token_logprobs(logits, token_ids, num_top)
    assert [row.token_id for row in rows] == token_ids
    for row, logprobs_V in zip(rows, logits.double().log_softmax(-1).tolist(), strict=True):
        chosen = logprobs_V[row.token_id]
        assert row.logprob == pytest.approx(chosen, abs=1e-5)
        assert row.rank == 1 + sum(value > chosen for value in logprobs_V)
        assert len(row.top) == min(num_top, vocab_size)
        likeliest = sorted(logprobs_V, reverse=True)[: len(row.top)]
        assert [value for _, value in row.top] == pytest.approx(likeliest, abs=1e-5)
        assert all(value == pytest.approx(logprobs_V[token], abs=1e-5) for token, value in row.top)


def test_many_rows_are_processed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn((20, 11), generator=torch.Generator().manual_seed(0))
    token_ids = [row % 11 for row in range(20)]
    at_once = token_logprobs(logits, token_ids, 3)
    for rows_at_once in (1, 7, 19, 20):
        monkeypatch.setattr(sampler, "ROWS_AT_ONCE", rows_at_once)
        assert token_logprobs(logits, token_ids, 3) == at_once
