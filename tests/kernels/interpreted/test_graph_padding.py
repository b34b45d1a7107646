"""Attention of a step that is padded to the shape of a CUDA graph: padding lies between the sequences."""

import pytest
import torch

from baton.engine.runner.step_inputs import GraphInputs, GraphShape, ModelInput, StepBuilder
from baton.kernels import ragged_attention
from tests.batches import make_batch, make_sequence, rest_of
from tests.kernels.outcomes import normal

CPU, PAGE_SIZE, MAX_PAGES = torch.device("cpu"), 4, 12
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16


@pytest.mark.parametrize("shape", [GraphShape(8, 5, 32), GraphShape(3, 4, 64)], ids=repr)
@pytest.mark.parametrize(("num_decodes", "prompts"), [(3, (11, 2)), (2, (30,)), (0, (7, 1, 9))])
def test_attention_of_a_padded_step_has_the_same_bits(
    num_decodes: int, prompts: tuple[int, ...], shape: GraphShape
) -> None:
    sequences = [
        make_sequence(str(row), range(length)) for row, length in enumerate((9,) * num_decodes + prompts)
    ]
    for row, sequence in enumerate(sequences):
        sequence.page_table = list(range(8 * row, 8 * row + 8))  # room for 32 tokens
    chunks = [rest_of(sequence, 8 if row < num_decodes else 0) for row, sequence in enumerate(sequences)]
    batch = make_batch(*chunks)
    arrays = StepBuilder(PAGE_SIZE, len(chunks), MAX_PAGES).build(batch)
    inputs = GraphInputs([shape], MAX_PAGES, CPU)
    inputs.write(arrays, shape)
    pages = normal(64, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM, dtype=torch.float16, device=CPU)
    padded = normal(shape.num_rows, NUM_HEADS, HEAD_DIM, dtype=torch.float16, device=CPU)
    num_decodes, num_tokens = arrays.num_decodes, len(arrays.token_ids) - arrays.num_decodes
    is_real = torch.zeros(shape.num_rows, dtype=torch.bool)
    is_real[:num_decodes] = is_real[shape.num_decodes : shape.num_decodes + num_tokens] = True
    plain = ModelInput.from_arrays(arrays).attention
    expected = ragged_attention.ragged_attention(padded[is_real], pages, plain, scale=0.25)
    got = ragged_attention.ragged_attention(padded, pages, inputs.step(shape).attention, scale=0.25)
    assert torch.equal(got[is_real], expected) and bool(expected.any())
    assert not got[~is_real].any()
