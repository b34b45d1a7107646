"""The marks of one rank's steps, as its device passes them; see step_marks.py."""

import threading
from collections import deque

import torch

from baton.engine.step_marks import NOTHING


class DeviceSteps:
    """Of one rank. `make` is called by the thread that runs the steps, with growing marks."""

    def __init__(self, device: torch.device) -> None:
        self.launched = NOTHING
        self._passed = NOTHING
        self._is_cuda = device.type == "cuda"
        self._events: deque[tuple[int, torch.cuda.Event]] = deque()  # oldest first
        self._lock = threading.Lock()

    def make(self, mark: int) -> None:
        """So much is launched; on a GPU, on the current stream."""
        if not self._is_cuda:
            self.launched = self._passed = mark
            return
        event = torch.cuda.current_stream().record_event()
        with self._lock:
            self._events.append((mark, event))
            self.launched = mark
            self._look()  # or they would pile up where nobody asks

    def has_passed(self, mark: int) -> bool:
        if mark > self._passed and self._is_cuda:
            with self._lock:
                self._look()
        return mark <= self._passed

    def _look(self) -> None:
        while self._events and self._events[0][1].query():
            self._passed, _ = self._events.popleft()
