"""Whether two replicas may move pages between each other: decided from their first messages, before any page.

Two replicas of one model and one layout of heads are compatible rank by rank, however many ranks each has:
what has to be said of every rank is where its doors are.
"""

from baton.errors import ConfigError
from baton.kvtransfer.messages import Doors, Hello
from baton.kvtransfer.transfer_plan import check_same_model


def check(ours: Hello, theirs: Hello) -> str | None:
    """Why not, naming what differs; None when they may. tp_size and page_size may differ."""
    if ours.protocol != theirs.protocol:
        return f"we speak version {ours.protocol} of the transfer protocol, the peer {theirs.protocol}"
    if ours.fingerprint != theirs.fingerprint:
        return f"we serve the model {ours.fingerprint}, the peer {theirs.fingerprint}"
    try:
        check_same_model(ours.layout, theirs.layout)
    except ConfigError as error:
        return str(error)
    if ours.incarnation == theirs.incarnation:
        return "the peer is this process itself"
    return None


def check_doors(hello: Hello, doors: Doors) -> str | None:
    """Why a peer's doors are not those of its ranks; None when each rank has its own."""
    num_ranks = hello.layout.tp_size
    if len(doors.ranks) != num_ranks:
        return f"{len(doors.ranks)} ranks have doors in a layout of tp_size {num_ranks}"
    if len({rank.incarnation for rank in doors.ranks}) != num_ranks:
        return "two ranks are one process"
    return None
