"""What the caller of an engine has run beside each of its ranks that is a process of its own."""

import msgspec


class RankSidecar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Named, not sent: every rank's process imports it by itself. engine/runner/tp_worker.py says what it
    does.
    """

    factory: str  # "package.module:name"; called with `arguments`, it makes the companion of one rank
    arguments: str
