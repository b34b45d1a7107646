"""The transports by name, best first. `--transport package.module:Class` names one from outside this tree."""

import difflib
import importlib
from typing import Final

from baton.errors import ConfigError
from baton.kvtransfer.transports.base import AUTO, Transport, TransportSet
from baton.kvtransfer.transports.cuda_ipc import CudaIpcTransport
from baton.kvtransfer.transports.one_sided import MooncakeTransport, NixlTransport
from baton.kvtransfer.transports.shm import ShmTransport
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
    module, colon, attribute = asked.partition(":")
    if not colon:
        near = difflib.get_close_matches(asked, TRANSPORTS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        names = ", ".join((AUTO, *TRANSPORTS))
        raise ConfigError(f"transport: expected one of {names} or package.module:Class, got {asked!r}{hint}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"transport: {asked!r} cannot be imported: {error}") from error
    missing = [
        each for each in ("can_serve", "listen", "connect") if not callable(getattr(found, each, None))
    ]
    missing += [each for each in ("name", "is_automatic") if not hasattr(found, each)]
    if missing:
        raise ConfigError(f"transport: {asked!r} is no Transport: it lacks {', '.join(missing)}")
    outside: Transport = found()
    return TransportSet((outside, *known), outside)
