"""One error tree, grouped by the caller's remedy, and the exit statuses of Baton's commands and processes.

A process of the cluster drains and ends with 0 when it is told once to end.
"""

import difflib
import reprlib
from collections.abc import Iterable
from typing import Final

from baton.tenants import Refusal

FAILED: Final = 1  # Baton could not do its work, or a part of it broke later
USER_ERROR: Final = 2  # the user must change an argument, a file or a variable
ORPHANED: Final = 3  # the parent has died
DRAINED: Final = 4  # an operator has drained the process, and no signal has told it to end
INTERRUPTED: Final = 130  # as after SIGINT
BROKEN_PIPE: Final = 141  # as after SIGPIPE
STOPPED_TWICE: Final = 143  # as after SIGTERM


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of Baton, for the end of an error message."""
    return f"pip install '.[{extra}]', in Baton's checkout"


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


def reason_of(error: Exception) -> str:
    """Return the text of an error in plain words: without the number and the file of an OSError."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the end of an error message; "" if no known name is alike."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def is_users_error(error: BaseException) -> bool:
    """Return whether the same call fails again until the user changes something."""
    return isinstance(error, BatonError) and isinstance(error, ValueError)


def status_of(error: BatonError) -> int:
    """Return the exit status of a command or process that ends with this error."""
    return USER_ERROR if is_users_error(error) else FAILED
