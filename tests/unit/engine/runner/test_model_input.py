import numpy as np
import torch

from baton.engine.runner.model_input import ModelInput
from baton.engine.runner.step_inputs import StepBuilder
from tests.batches import make_batch, make_sequence, rest_of

CPU = torch.device("cpu")


def test_on_the_cpu_tensors_share_memory_with_the_arrays() -> None:
    decode, prefill = make_sequence("d", [1, 2, 3]), make_sequence("p", range(9))
    decode.page_table, prefill.page_table = [5], [1, 2, 3]
    arrays = StepBuilder(4, 4, 8).build(make_batch(rest_of(decode, 2), rest_of(prefill)))
    step = ModelInput.from_arrays(arrays, CPU)
    for tensor, array in (
        (step.token_ids_T, arrays.token_ids),
        (step.positions_T, arrays.positions),
        (step.slots_T, arrays.slots),
        (step.cu_seqlens_B1, arrays.cu_seqlens),
        (step.context_lens_B, arrays.context_lens),
        (step.page_table_BP, arrays.page_table),
        (step.logit_rows_R, arrays.logit_rows),
    ):
        assert np.shares_memory(tensor.numpy(), array) and tensor.tolist() == array.tolist()
    assert (step.num_decodes, step.max_seqlen_q) == (1, 9)


def test_attention_is_prepared_once_for_all_layers() -> None:
    sequence = make_sequence("s", range(5))
    sequence.page_table = [0, 1]
    step = ModelInput.from_arrays(StepBuilder(4, 4, 8).build(make_batch(rest_of(sequence))), CPU)
    assert step.attention is step.attention
    assert step.attention.page_table_BP is step.page_table_BP
    assert (step.attention.num_decodes, step.attention.max_seqlen_q) == (0, 5)
