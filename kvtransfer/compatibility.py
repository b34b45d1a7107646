"""Whether two ranks may move pages between each other: decided from their first messages, before any page."""

from baton.errors import ConfigError
from baton.kvtransfer.messages import Hello
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
    for hello in (ours, theirs):
        if hello.rank >= hello.layout.tp_size:
            return f"there is no rank {hello.rank} in a layout of tp_size {hello.layout.tp_size}"
    if ours.incarnation == theirs.incarnation:
        return "the peer is this process itself"
    return None
