"""What LocalRuntime starts in tests instead of a process of the cluster: it does as its name says.

serves: says so and waits for SIGTERM. lives: also says every 50 ms that it is alive.
fails, fails-us: says why not. says-much: longer than a report may be. prints: something else first.
loads: says how far, then serves. crashes: ends without a word.
drains: serves, and ends as one that an operator has drained; drains-later: on SIGUSR1.
falls-N: serves, and ends by itself after its Nth start at once (a file counts them).
"""

import os
import signal
import sys
import threading

import msgspec

from baton.cluster.process_spec import (
    DRAINED,
    Assignment,
    Loading,
    LoopAlive,
    ProcessFailed,
    ProcessStarted,
    Report,
)
from baton.messages.workers import Address


def say(what: Report | Loading | LoopAlive) -> None:
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
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
        case "drains-later":
            signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(DRAINED))
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


if __name__ == "__main__":
    main()
