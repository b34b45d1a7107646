"""Low-rank updates of a projection: y += scale * B @ (A @ x), with the A and B of each row's adapter.

A CPU has two C kernels (csrc/lora.c) that take the rows of all adapters at once. Elsewhere `linear`
multiplies the rows of one adapter after another. A row's result depends on its inputs and its adapter alone.

Shapes: T rows, K inputs, N outputs, R rank.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from baton.kernels import native
from baton.kernels.linear import LinearWeight, linear, pack_linear

PANEL: Final = 64  # outputs, as in csrc/lora.c
NO_ADAPTER: Final = -1


@dataclass(frozen=True)
class AdapterRows:
    """The adapter of each row of a step, by its slot; NO_ADAPTER for a row without one."""

    slots_T: NDArray[np.int32]  # contiguous
    max_rank: int  # of the adapters in all slots
    device: torch.device

    @cached_property
    def highest_slot(self) -> int:
        """The highest slot of any row."""
        return int(self.slots_T.max(initial=NO_ADAPTER))

    @cached_property
    def groups(self) -> list[tuple[int, Tensor]]:
        """(slot, int64 rows on the device) of each adapter of the step. A GPU is not waited for."""
        found = [
            (int(slot), torch.from_numpy((self.slots_T == slot).nonzero()[0]))
            for slot in np.unique(self.slots_T)
            if slot != NO_ADAPTER
        ]
        if self.device.type != "cuda":
            return found
        return [(slot, row_I.pin_memory().to(self.device, non_blocking=True)) for slot, row_I in found]


class LowRankWeights:
    """A and B of one projection for the adapters in each slot, on one rank."""

    def __init__(self, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: of the inputs. Without adapters at first."""
        self.num_outputs, self.num_inputs, self.dtype = num_outputs, num_inputs, dtype
        self._is_native = device.type == "cpu" and native.handles(dtype)
        self._pairs: dict[int, tuple[Tensor, ...]] = {}  # slot -> A, and B in panels: [N / PANEL, R, PANEL]
        self._packed: dict[int, tuple[LinearWeight, LinearWeight]] = {}  # in place of these, elsewhere
        self._addresses = np.zeros((2, 0), np.int64)  # of the pairs; 0: none
        self._ranks = np.zeros(0, np.int32)

    def put(self, slot: int, a_RK: Tensor, b_NR: Tensor, memory: native.HugeArena) -> None:
        """Keep the weights of a slot, in place of those that it had. The scale is a part of B.

        memory: of the adapter; many adapters are read faster from huge pages.
        """
        if not self._is_native:
            self._packed[slot] = pack_linear(a_RK.to(self.dtype)), pack_linear(b_NR.float().contiguous())
            return
        if slot >= len(self._ranks):
            more = slot + 1 - len(self._ranks)
            self._addresses = np.pad(self._addresses, ((0, 0), (0, more)))
            self._ranks = np.pad(self._ranks, (0, more))
        padded_NR = functional.pad(b_NR, (0, 0, 0, -self.num_outputs % PANEL))
        panels = padded_NR.unflatten(0, (-1, PANEL)).transpose(1, 2)
        pair = tuple(
            memory.empty(each.numel(), self.dtype).view(each.shape).copy_(each) for each in (a_RK, panels)
        )
        self._pairs[slot] = pair
        self._addresses[:, slot] = [each.data_ptr() for each in pair]
        self._ranks[slot] = len(a_RK)

    def remove(self, slot: int) -> None:
        """Forget the weights of a slot, if it has any."""
        self._packed.pop(slot, None)
        if self._pairs.pop(slot, None) is not None:
            self._addresses[:, slot] = 0

    def shrink(self, x_TK: Tensor, rows: AdapterRows, *, num_splits: int = 1) -> Tensor:
        """A @ x of each row in its first R columns, zeros elsewhere: [T, max_rank] fp32.

        num_splits: as in `linear`.
        """
        hidden_TR = torch.zeros((len(x_TK), rows.max_rank), dtype=torch.float32, device=x_TK.device)
        if not self._is_native:
            for slot, row_I in rows.groups:
                if slot in self._packed:
                    a = self._packed[slot][0]
                    part_IR = linear(x_TK[row_I], a, num_splits=num_splits, out_dtype=torch.float32)
                    hidden_TR[row_I, : a.num_outputs] = part_IR
            return hidden_TR
        if not self._pairs:
            return hidden_TR
        x_TK = x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()
        slots_T = self._known(rows)
        native.function("baton_lora_shrink", "pnppppnnnnii")(
            x_TK.data_ptr(),
            x_TK.stride(0) * x_TK.element_size(),
            slots_T.ctypes.data,
            self._addresses.ctypes.data,
            self._ranks.ctypes.data,
            hidden_TR.data_ptr(),
            rows.max_rank,
            len(x_TK),
            self.num_inputs,
            rows.max_rank,
            num_splits,
            native.DTYPE_CODES[x_TK.dtype],
        )
        return hidden_TR

    def expand(self, hidden_TR: Tensor, rows: AdapterRows, y_TN: Tensor) -> None:
        """Add B @ hidden to y, fp32, in place; the columns of y are adjacent.

        hidden_TR: of `shrink`, summed over ranks.
        """
        if not self._is_native:
            for slot, row_I in rows.groups:
                if slot in self._packed:
                    b = self._packed[slot][1]
                    y_TN[row_I] += linear(hidden_TR[row_I, : b.num_inputs], b)
            return
        if not self._pairs:
            return
        slots_T = self._known(rows)
        native.function("baton_lora_expand", "pnppppnnnni")(
            hidden_TR.data_ptr(),
            hidden_TR.stride(0),
            slots_T.ctypes.data,
            self._addresses[1].ctypes.data,
            self._ranks.ctypes.data,
            y_TN.data_ptr(),
            y_TN.stride(0),
            len(y_TN),
            self.num_outputs,
            rows.max_rank,
            native.DTYPE_CODES[self.dtype],
        )

    def _known(self, rows: AdapterRows) -> NDArray[np.int32]:
        """The slots of the rows, without slots beyond the last one that has weights here."""
        if rows.highest_slot < len(self._ranks):
            return rows.slots_T
        return np.where(rows.slots_T < len(self._ranks), rows.slots_T, np.int32(NO_ADAPTER))
