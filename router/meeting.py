"""Which workers have met those that they need: only they are given work with others."""

from collections.abc import Sequence
from typing import TypeAlias

from baton.router.membership import Member, Membership

Reached: TypeAlias = tuple[frozenset[str], ...]  # by each gateway


class Meeting:
    """Counts anew only when the members, or what is reached, have changed: it compares all with all."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._counted: tuple[int, Reached] | None = None
        self._num_met = 0

    def num_met(self, reached: Reached) -> int:
        """Workers that each gateway could have answer now.

        A prefill worker needs every decode worker of its weights, as far as pages and words go, and they it.
        """
        present = (self._members.version, reached)
        if present != self._counted:
            self._counted = present
            self._num_met = _count(list(self._members.all()), reached)
        return self._num_met


def _count(members: Sequence[Member], reached: Reached) -> int:
    return sum(
        all(member.id in each for each in reached) and all(_meets(member, other) for other in members)
        for member in members
    )


def _meets(member: Member, other: Member) -> bool:
    if member.worker.role is other.worker.role or member.worker.fingerprint != other.worker.fingerprint:
        return True
    return member.id in other.reached and other.id in member.reached
