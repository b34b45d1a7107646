"""How far the steps of one rank have come on its device: which of its writes into KV pages are over.

1. Rank 0 numbers the steps, so a step has the same number on every rank. A mark names a place in a step: some
   of its layers are written, or it has ended.
2. The rank makes a mark when it has launched as much. On a CPU that much is written then. On a GPU it is
   written once the event recorded behind it on the model's stream has passed.
3. Anybody may ask whether a mark `has_passed`, from any thread. Marks pass in order.

Two waits rest on this. A page that is granted to writers outside the model's stream (a receiver, a peer that
has mapped the pool, `unpack` on its own stream) must not be written by a launched step any more: on every
rank the mark at which the page was let go has passed before anybody is let in. A page that is sent must have
been written by every rank: each rank reads its part once the mark named by the push has passed there. Later
steps on the model's own stream come after by themselves, and wait for nothing; so do copies to and from the
host, which run on that stream too.
"""

from typing import Final, Protocol

NOTHING: Final = 0  # has always passed
_LAYER_BITS: Final = 16
_WHOLE_STEP: Final = 2**_LAYER_BITS - 1


def mark_of(step: int, num_layers: int | None = None) -> int:
    """The place in step `step` where the first num_layers layers are written; None: where it has ended."""
    return (step << _LAYER_BITS) + (_WHOLE_STEP if num_layers is None else num_layers)


class StepMarks(Protocol):
    """What others ask of a rank's steps."""

    @property
    def launched(self) -> int:
        """The latest mark made. Asked by the thread that runs the steps."""

    def has_passed(self, mark: int) -> bool:
        """Whether all that was launched before the mark is written. From any thread."""
