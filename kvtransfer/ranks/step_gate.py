"""Commands of parts that wait for a step of this rank: the step may still write the pages."""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from baton.kvtransfer.ranks.messages import OpenPart, PartCommand, PushPart
from baton.kvtransfer.transports.message_stream import Post

SHORTEST_SLEEP_S: Final = 2e-5  # between two checks of the marks; each sleep is twice as long, up to
LONGEST_SLEEP_S: Final = 1e-3


class CompletedSteps(Protocol):
    """The progress of this rank's steps."""

    def has_passed(self, mark: int) -> bool:
        """Whether the work that was launched before the mark has ended. From any thread."""


class NoSteps:
    """The steps of a pool that no engine computes in: every mark has passed."""

    def has_passed(self, mark: int) -> bool:
        return True


class StepGate:
    """Delays commands until a step of this rank has come far enough (see engine/cache/page_pool.py).

    A command whose mark has passed is carried out at once. Any other command waits, and so do all later
    commands for the same part, so that each part gets its commands in the order in which they were given. A
    thread checks the marks while a command waits, and sleeps otherwise.
    """

    def __init__(
        self,
        steps: CompletedSteps,
        carry_out: Callable[[PartCommand], None],
        post: Post,
        *,
        pushes_wait: bool = True,
    ) -> None:
        """carry_out: called by the rank's thread. pushes_wait: False where reads of pages follow their writes
        anyway.
        """
        self._steps = steps
        self._pushes_wait = pushes_wait
        self._carry_out = carry_out
        self._post = post
        self._waiting: dict[tuple[bytes, int], deque[PartCommand]] = {}  # part -> its commands, at least one
        self._marks: deque[tuple[int, tuple[bytes, int]]] = deque()  # (mark, the part that waits for it)
        self._has_marks = threading.Condition()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def perform(self, command: PartCommand) -> None:
        key = command.transfer, command.part
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.append(command)
        elif self._may(command):
            self._carry_out(command)
        else:
            self._waiting[key] = deque((command,))
            self._watch(self._mark_before(command), key)

    def close(self) -> None:
        """Commands that wait are never carried out. From any thread."""
        self._is_closed.set()
        with self._has_marks:
            self._has_marks.notify()

    def _may(self, command: PartCommand) -> bool:
        mark = self._mark_before(command)
        return not mark or self._steps.has_passed(mark)

    def _watch(self, mark: int, key: tuple[bytes, int]) -> None:
        with self._has_marks:
            self._marks.append((mark, key))
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="kv-steps", daemon=True)
                self._thread.start()
            self._has_marks.notify()

    def _look(self) -> None:
        sleep_s = SHORTEST_SLEEP_S
        while not self._is_closed.is_set():
            with self._has_marks:
                if not self._marks:
                    sleep_s = SHORTEST_SLEEP_S
                    self._has_marks.wait()
                    continue
                found = [each for each in self._marks if self._steps.has_passed(each[0])]
                for each in found:
                    self._marks.remove(each)
            for _, key in found:
                self._post(partial(self._go_on, key))
            if not found:
                self._is_closed.wait(sleep_s)
                sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)

    def _go_on(self, key: tuple[bytes, int]) -> None:
        """Carry out the part's commands up to the next one that has to wait."""
        waiting = self._waiting.pop(key)
        while waiting and not self._is_closed.is_set():
            if not self._may(waiting[0]):
                self._waiting[key] = waiting
                self._watch(self._mark_before(waiting[0]), key)
                return
            self._carry_out(waiting.popleft())

    def _mark_before(self, command: PartCommand) -> int:
        """The mark that has to pass before the command; 0 for none."""
        if isinstance(command, OpenPart) or (isinstance(command, PushPart) and self._pushes_wait):
            return command.after
        return 0
