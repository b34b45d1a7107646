"""Which workers have met those that they need: only they are given work with others."""

from collections.abc import Iterable, Sequence

from baton.router.membership import Member


def num_met(members: Sequence[Member], reached: Iterable[frozenset[str]]) -> int:
    """Workers that each gateway could have answer now. reached: by each gateway.

    A prefill worker needs every decode worker of its weights, as far as pages and words go, and they need it.
    """
    everywhere = list(reached)
    return sum(
        all(member.id in each for each in everywhere) and all(_meets(member, other) for other in members)
        for member in members
    )


def _meets(member: Member, other: Member) -> bool:
    if member.worker.role is other.worker.role or member.worker.fingerprint != other.worker.fingerprint:
        return True
    return member.id in other.reached and other.id in member.reached
