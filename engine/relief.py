"""What a plan does for a machine that is overloaded, when it is told to.

- Small chunks: while sequences decode, prompts get a quarter of a step at most, so that no answer waits long
  for its next token. Chunks change no token.
- Room: while few pages are left, running sequences of the lowest class give theirs, the longest first. Their
  KV goes to the host tier if there is one with room, and is computed again if not. None of that class comes
  in that would leave few pages. Nothing happens where no better class runs.
"""

from typing import Final, NamedTuple, Protocol

from baton.engine.pages import PagePool
from baton.engine.plan import PreemptMode
from baton.engine.sequence import Sequence
from baton.engine.victims import Victims
from baton.pressure import Rung

CHUNK_SHARE: Final = 4  # of a step, one part
LOW_WATER: Final = 0.1  # of all pages


class Relief(NamedTuple):
    small_chunks: bool = False
    makes_room: bool = False


def relief_on(rung: Rung) -> Relief:
    return Relief(small_chunks=rung >= Rung.SMALL_CHUNKS, makes_room=rung >= Rung.MAKE_ROOM)


class Draft(Protocol):
    """What is asked of the draft of a plan."""

    available: int  # pages

    def seated(self) -> list[Sequence]: ...
    def num_missing(self, sequence: Sequence, num_tokens: int) -> int: ...
    def preempt(self, sequence: Sequence, mode: PreemptMode) -> None: ...


class DraftRelief:
    def __init__(self, draft: Draft, pool: PagePool, victims: Victims) -> None:
        self._draft = draft
        self._victims = victims
        self._low_water = int(pool.num_pages * LOW_WATER)

    def make_room(self) -> None:
        num_lacking = self._low_water - self._draft.available
        if num_lacking > 0:
            for victim in self._victims.of_lowest_class(num_lacking):
                self._draft.preempt(victim, PreemptMode.SWAP)

    def allows(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may come in."""
        if all(each.rank[0] >= sequence.rank[0] for each in self._draft.seated()):
            return True
        num_pages = self._draft.num_missing(sequence, sequence.num_tokens)
        return self._draft.available - num_pages >= self._low_water
