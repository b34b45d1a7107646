"""A decode step launches at most eight kernels a layer: a forward pass under the interpreter is counted."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from baton.engine.runner.step_inputs import ModelInput, StepArrays
from baton.kernels.triton.kernel import Kernel
from tests.tiny_models import tiny_engine, write_config

MOST_LAUNCHES_A_LAYER = 8
ALLOCATIONS = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty")


class LaunchCounter(TorchDispatchMode):
    """Counts operations of torch that would launch a kernel: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and function._schema.name not in ALLOCATIONS:
            self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def launches(folder: Path, num_layers: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The launches of a decode step of two sequences, by name."""
    made = tiny_engine(write_config(folder, num_hidden_layers=num_layers), max_model_len=64)
    counter = LaunchCounter()
    launch = Kernel.__getitem__

    def counted(self: Kernel, grid: tuple[int, ...]) -> Any:
        counter.names.append(self.jitted.fn.__name__)
        return partial(uncounted, launch(self, grid))

    def uncounted(run: Any, *arguments: Any, **options: Any) -> None:
        with _disable_current_modes():  # the interpreter itself uses torch
            run(*arguments, **options)

    arrays = StepArrays(
        token_ids=np.array([3, 5]),
        positions=np.array([9, 0]),
        slots=np.array([9, 16]),
        cu_seqlens=np.arange(3, dtype=np.int32),
        context_lens=np.array([10, 1], np.int32),
        page_table=np.array([[0, 1, 2], [4, 0, 0]], np.int32),
        logit_rows=np.arange(2),
        num_decodes=2,
        max_seqlen_q=1,
        copies_to_host=(),
        copies_to_device=(),
    )
    step = ModelInput.from_arrays(arrays)
    step.attention  # noqa: B018 - made once a step
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(Kernel, "__getitem__", counted)
        with counter:
            made.runner.model.forward(step, made.runner.pool.device)
    made.close()
    return counter.names


def test_a_decode_step_launches_at_most_eight_kernels_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, three = (launches(tmp_path / str(number), number, monkeypatch) for number in (1, 3))
    a_layer = (len(three) - len(one)) / 2
    assert a_layer <= MOST_LAUNCHES_A_LAYER, three
