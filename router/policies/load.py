"""Which of several workers: pure functions of what is known about their load."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from baton.config.router import PolicyName


class LoadView(NamedTuple):
    """A worker that could take the work."""

    worker: str  # its id
    load: float  # any measure, the same for all views of one choice


class Draw(NamedTuple):
    """What tells one choice from the next."""

    turn: int  # how many of this kind came before
    random: int


Policy: TypeAlias = Callable[[Sequence[LoadView], Draw], LoadView]


def round_robin(views: Sequence[LoadView], draw: Draw) -> LoadView:
    """One after the other, in the views' order; whatever their load."""
    return views[draw.turn % len(views)]


def least_loaded(views: Sequence[LoadView], draw: Draw) -> LoadView:
    """The one with the least load; among equals by chance."""
    least = min(view.load for view in views)
    equals = [view for view in views if view.load == least]
    return equals[draw.random % len(equals)]


POLICIES: Final[Mapping[PolicyName, Policy]] = {"round-robin": round_robin, "least-loaded": least_loaded}
