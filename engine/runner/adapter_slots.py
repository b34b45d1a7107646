"""Keeps the LoRA adapters of a replica: the contents of their files, and the slots for computing.

1. When a request with an adapter is checked, a thread reads the files if there is room to keep the contents.
2. The sequence is held until the files have been read and a step has placed the adapter in a slot on rank 0.
   Meanwhile the steps of other sequences go on.
3. The next step gives the other ranks the files.
4. Slots of adapters without sequences are freed when there are more than `max_loras`; contents of files
   that no held sequence waits for make room when there are `max_cpu_loras`.

The step loop reads no file, and a request costs two reads at most: one when it is checked, and one more when
it starts after others have taken the room.
"""

import itertools
from collections.abc import Collection, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np

from baton.adapters import Adapter, AdapterFiles
from baton.engine.models.adapters import AdapterTensors
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.step_inputs import StepArrays
from baton.engine.scheduler.sequence import Batch
from baton.errors import InvalidRequest, ModelError
from baton.kernels.lora import NO_ADAPTER

_UNUSABLE: Final = "the adapter cannot be used"


class AdapterSlots:
    """The adapters of a replica. Rank 0 changes a slot at once, other ranks before the next step.

    Up to `max_loras` slots have adapters, the latest ones that requests asked for. While more adapters have
    live sequences there are more slots, so that no request waits for one.
    """

    def __init__(self, runner: ModelRunner, max_loras: int, max_cpu_loras: int) -> None:
        self.num_reads = 0  # of the files of an adapter, those that failed included
        self._runner = runner
        self._max_loras, self._max_cpu_loras = max_loras, max_cpu_loras
        self._reader = ThreadPoolExecutor(1, "lora")
        # digest -> what the reader found, the least recently asked for first
        self._contents: dict[bytes, Future[tuple[AdapterFiles, AdapterTensors]]] = {}
        self._slots: dict[bytes, int] = {}  # digest -> slot, the least recently asked for first
        self._changed: list[tuple[int, AdapterFiles | None]] = []  # since the last step
        self._errors: dict[Adapter, str] = {}  # of the last `place`; exceptions would keep tensors

    def check(self, adapter: Adapter) -> None:
        """Have the files read, if there is room to keep them.

        Raises InvalidRequest for a replica without adapters, and for files that could not be used; later
        requests have them read again.
        """
        if self._runner.adapters is None:
            raise InvalidRequest("LoRA adapters need --enable-lora")
        if adapter.digest in self._contents:
            self._contents_of(adapter, frozenset())
        elif adapter.digest not in self._slots and len(self._contents) < self._max_cpu_loras:
            self._read(adapter)

    def place(self, wanted: Collection[Adapter], live: Set[bytes]) -> None:
        """Put these adapters in slots as far as their files are here; `is_placed` says which ones are there.

        wanted: those of held sequences, which keep the contents of their files. live: digests of the adapters
        with sequences, which keep their slots.
        """
        self._errors.clear()
        digests = {adapter.digest for adapter in wanted}
        for adapter in wanted:
            try:
                self._place(adapter, live, digests)
            except InvalidRequest as error:
                self._errors[adapter] = str(error)

    def is_placed(self, adapter: Adapter) -> bool:
        """Return whether an adapter of the last `place` is in a slot.

        Raises InvalidRequest for files that cannot be used.
        """
        if adapter in self._errors:
            raise InvalidRequest(self._errors[adapter])
        return adapter.digest in self._slots

    def with_adapters(self, arrays: StepArrays, batch: Batch) -> StepArrays:
        """The step with the slot of each token, and with the adapters that other ranks lack."""
        changed, self._changed = tuple(self._changed), []
        arrays = arrays._replace(adapters=changed)
        adapters = [sequence.adapter for sequence in batch.sequences]
        if not any(adapters):
            return arrays
        slots = [NO_ADAPTER if each is None else self._slots[each.digest] for each in adapters]
        slots_T = np.full(len(arrays.token_ids), NO_ADAPTER, np.int32)  # padding has none
        rows = np.repeat(np.array(slots, np.int32), batch.lengths)
        slots_T[: len(rows)] = rows
        return arrays._replace(adapter_slots=slots_T)

    def close(self) -> None:
        """End the thread after the read that it is at."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _place(self, adapter: Adapter, live: Set[bytes], wanted: Set[bytes]) -> None:
        slot = self._slots.pop(adapter.digest, None)
        if slot is None:
            contents = self._contents_of(adapter, wanted)
            if contents is None:
                return
            files, tensors = contents
            slot = next(each for each in itertools.count() if each not in self._slots.values())
            try:
                self._runner.put_adapter(slot, tensors)
            except RuntimeError as error:  # torch has no memory
                raise InvalidRequest(f"{_UNUSABLE}: {error}") from None
            self._note(slot, files)
        idle = [digest for digest in self._slots if digest not in live]
        self._slots[adapter.digest] = slot
        for digest in idle[: max(0, len(self._slots) - self._max_loras)]:
            freed = self._slots.pop(digest)
            self._runner.put_adapter(freed, None)
            self._note(freed, None)

    def _note(self, slot: int, files: AdapterFiles | None) -> None:
        if self._runner.rank.size > 1:
            self._changed.append((slot, files))

    def _contents_of(
        self, adapter: Adapter, wanted: Set[bytes]
    ) -> tuple[AdapterFiles, AdapterTensors] | None:
        """The contents of the files; None while they are read, or wait for room. Raises InvalidRequest."""
        contents = self._contents.pop(adapter.digest, None)
        if contents is None:
            if self._has_room(wanted):
                self._read(adapter)
            return None
        try:
            found = contents.result() if contents.done() else None
        except (ModelError, MemoryError, RuntimeError) as error:  # RuntimeError: torch has no memory
            raise InvalidRequest(f"{_UNUSABLE}: {error}") from None
        self._contents[adapter.digest] = contents  # now the latest
        return found

    def _has_room(self, wanted: Set[bytes]) -> bool:
        """Forget the oldest contents that are not wanted, until there is room for others."""
        idle = [digest for digest, each in self._contents.items() if each.done() and digest not in wanted]
        for digest in idle[: max(0, 1 + len(self._contents) - self._max_cpu_loras)]:
            del self._contents[digest]
        return len(self._contents) < self._max_cpu_loras

    def _read(self, adapter: Adapter) -> None:
        self._contents[adapter.digest] = self._reader.submit(self._read_files, adapter)

    def _read_files(self, adapter: Adapter) -> tuple[AdapterFiles, AdapterTensors]:
        """Runs in the thread."""
        try:
            return self._runner.read_adapter(adapter)
        finally:
            self.num_reads += 1
