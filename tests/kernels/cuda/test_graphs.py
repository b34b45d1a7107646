"""The launches of a decode step are captured once and replayed with other contents."""

import pytest
import torch

from baton.kernels.paged_attention import paged_attention_decode_triton
from baton.kernels.prefill_attention import prefill_attention_reference
from baton.kernels.sample import sample, sample_reference
from tests.kernels.attention_cases import Shape, paged_kv
from tests.kernels.outcomes import normal
from tests.kernels.sampling_cases import ALL, sampling_tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("window", [None, 100])
def test_one_graph_of_decode_attention_serves_any_context_lengths(window: int | None) -> None:
    device = torch.device("cuda")
    shape = Shape(page_size=16, num_kv_heads=2, group_size=4, head_dim=128, window=window)
    kv = paged_kv([700, 700, 700], shape, torch.bfloat16, device)
    query = normal(3, shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device=device)

    def decode() -> torch.Tensor:
        return paged_attention_decode_triton(
            query, kv.pages, kv.page_table, kv.context_lens, scale=shape.scale, window=window
        )

    decode()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode()
    for lens in ([700, 0, 17], [1, 250, 699], [64, 64, 0]):
        kv.context_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        expected = prefill_attention_reference(
            query,
            kv.pages,
            kv.page_table,
            torch.arange(4),
            kv.context_lens,
            scale=shape.scale,
            window=window,
        )
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_one_graph_of_sampling_serves_any_position() -> None:
    device = torch.device("cuda")
    logits, sampling = normal(8, 1000, dtype=torch.float32, device=device), sampling_tensors(8, ALL, device)
    sample(logits, sampling)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, sampling)
    for position in range(3):
        sampling.position_B.fill_(position)
        graph.replay()
        assert torch.equal(tokens, sample_reference(logits, sampling))
