"""Who wants to hear, while a step runs, how far it is: KV can leave while later layers compute."""

from collections.abc import Sequence
from typing import Protocol

from baton.engine.plan import ScheduledChunk


class LayerWatch(Protocol):
    """Both calls come from within `Engine.step`, in its thread, and hold it up; what they raise fails it.

    Pages of the step's chunks are allocated by then, and nothing moves them before the step ends; page
    tables and counts are otherwise those of before the step, and the engine is not to be called.
    """

    def begin(self, chunks: Sequence[ScheduledChunk]) -> int:
        """The step computes these. In how many groups of layers to tell of it; 0 for not at all."""
        ...

    def layers_written(self, first: int, stop: int) -> None:
        """Layers [first, stop) of all chunks' keys and values are in their pages: on a GPU, for what follows
        on the current stream."""
        ...
