"""The exit statuses of Baton's commands and processes.

A process of the cluster drains and ends with 0 when it is told once to end. The command line
and every process import this module, so it imports nothing but the errors.
"""

from typing import Final

from baton.errors import BatonError

FAILED: Final = 1  # Baton could not do its work, or a part of it broke later
USER_ERROR: Final = 2  # the user must change an argument, a file or a variable
ORPHANED: Final = 3  # the parent has died
DRAINED: Final = 4  # an operator has drained the process, and no signal has told it to end
INTERRUPTED: Final = 130  # as after SIGINT
BROKEN_PIPE: Final = 141  # as after SIGPIPE
STOPPED_TWICE: Final = 143  # as after SIGTERM


def is_users_error(error: BaseException) -> bool:
    """Return whether the same call fails again until the user changes something."""
    return isinstance(error, BatonError) and isinstance(error, ValueError)


def status_of(error: BatonError) -> int:
    """Return the exit status of a command or process that ends with this error."""
    return USER_ERROR if is_users_error(error) else FAILED
