"""The transports by name, best first. `--transport package.module:Class` names one from outside this tree."""

from typing import Final

from baton.config.loader import import_class
from baton.kvtransfer.transports.base import AUTO, Transport, TransportSet
from baton.kvtransfer.transports.direct import CudaIpcTransport, ShmTransport
from baton.kvtransfer.transports.one_sided import MooncakeTransport, NixlTransport
from baton.kvtransfer.transports.tcp import TcpTransport
from baton.kvtransfer.transports.torch_distributed import GlooTransport, NcclTransport

TRANSPORTS: Final[dict[str, Transport]] = {
    each.name: each
    for each in (
        ShmTransport(),
        CudaIpcTransport(),
        NcclTransport(),
        NixlTransport(),
        MooncakeTransport(),
        GlooTransport(),
        TcpTransport(),
    )
}


def transport_set(asked: str) -> TransportSet:
    """Return the transports of a rank. asked: the setting, a name, `package.module:Class` or auto.

    Raises ConfigError when there is no such transport.
    """
    known = tuple(TRANSPORTS.values())
    if asked == AUTO:
        return TransportSet(known)
    if asked in TRANSPORTS:
        return TransportSet(known, TRANSPORTS[asked])
    outside: Transport = import_class("transport", asked, Transport, (AUTO, *TRANSPORTS))()
    return TransportSet((outside, *known), outside)
