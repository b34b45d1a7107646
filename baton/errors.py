"""One error tree, grouped by the caller's remedy."""

import reprlib

from baton.tenants import Refusal


class BatonError(Exception):
    """Root of every error that Baton raises on purpose."""


class ConfigError(BatonError, ValueError):
    """The operator must change a setting; the message names the setting, what was expected and what came."""


class ModelError(BatonError, ValueError):
    """The model directory cannot be served: missing, damaged, unsafe or of an unknown architecture."""


class InvalidRequest(BatonError, ValueError):
    """The client must change the request; the unchanged request fails again."""


class Overloaded(BatonError):
    """There is no room now; the same request may succeed after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Refused(Overloaded):
    """The tenant's quota or latency objectives, or the overload level, forbid the request now."""

    def __init__(
        self, message: str, *, refusal: Refusal, retry_after_s: float, should_retry: bool = True
    ) -> None:
        """should_retry: the client may retry by itself after `retry_after_s`."""
        super().__init__(message, retry_after_s=retry_after_s)
        self.refusal = refusal
        self.should_retry = should_retry


class WorkerLost(BatonError):
    """A process that held part of the work is gone; the work can be replayed elsewhere."""


class TransferFailed(BatonError):
    """KV pages did not reach the other worker; another transport or another attempt may succeed."""


class IntegrityError(BatonError, AssertionError):
    """A ledger contradicts itself: a bug of Baton, never the caller's fault."""


class PeerGone(WorkerLost):
    """The other end of a connection has closed it, or died."""


class WireError(BatonError):
    """A peer broke a rule of the wire: it is dropped, and counted under `reason`."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ProtocolError(WireError):
    """A well-formed message is illegal in the receiver's state."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="protocol")


def shown(value: object) -> str:
    """Return a value of any size for an error message: shortened, with its type."""
    return f"{reprlib.repr(value)} ({type(value).__name__})"
