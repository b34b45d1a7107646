"""A process that LocalRuntime starts in tests in place of a process of the cluster; its name chooses its
behaviour.

serves: reports its start and waits for SIGTERM. lives: also reports every 50 ms that it is alive. fails,
fails-us: reports an error. says-much: reports more than a report may have. prints: prints another line first.
loads: reports its progress, then serves. crashes: ends without a report. drains: serves, and ends like a
worker that an operator has drained. falls: ends at once, and serves from its start number `num_falls` on (a
file counts the starts). deaf: serves, and ignores SIGTERM.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Final

import msgspec

from baton.cluster.runtimes.base import (
    Assignment,
    Loading,
    LoopAlive,
    ProcessFailed,
    ProcessMessage,
    ProcessSpec,
    ProcessStarted,
)
from baton.errors import DRAINED
from baton.messages.bounds import Kind
from baton.messages.workers import Address

PEER: Final = (sys.executable, str(Path(__file__)))


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True):
    log: str = ""  # a file that grows by a byte with every start of "falls"
    num_falls: int = 0


def spec(name: str, *, num_ranks: int = 0, config: PeerConfig | None = None) -> ProcessSpec:
    """Return the spec of a process of this name."""
    return ProcessSpec(kind=Kind.WORKER, name=name, config=config or PeerConfig(), num_ranks=num_ranks)


def say(what: ProcessMessage) -> None:
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


def main() -> int:
    given = msgspec.json.decode(sys.stdin.buffer.readline(), type=Assignment)
    config = msgspec.json.decode(given.config)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    match given.name:
        case "fails":
            say(ProcessFailed("the model is nowhere", is_users_error=True))
            sys.exit(2)
        case "fails-us":
            say(ProcessFailed("a bug", is_users_error=False))
            sys.exit(1)
        case "says-much":
            say(ProcessFailed("x" * 70_000, is_users_error=False))
            sys.exit(1)
        case "prints":
            print("a library says hello")
        case "crashes":
            os.kill(os.getpid(), signal.SIGKILL)
        case "falls":
            with open(config["log"], "a") as log:
                log.write("x")
            say(ProcessStarted(Address("127.0.0.1", 1)))
            if os.path.getsize(config["log"]) < config["num_falls"]:
                os.kill(os.getpid(), signal.SIGKILL)
        case "loads":
            for num_bytes in (1, 3):
                say(Loading(num_bytes, 4))
        case "drains":
            say(ProcessStarted(Address("127.0.0.1", 1)))
            sys.exit(DRAINED)
        case "lives":
            say(ProcessStarted(Address("127.0.0.1", 1)))
            while not stop.wait(0.05):
                say(LoopAlive())
            sys.exit(0)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say(ProcessStarted(Address("127.0.0.1", int.from_bytes(given.generations[0].id[:2]))))
    stop.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
