"""NIXL or Mooncake moves scattered pages between two processes: a rival for `baton bench kv --rival`.

    PYTHON bench/kv/other_library.py nixl|mooncake PAGE_BYTES NUM_PAGES

PYTHON needs the library and NumPy, but not Baton. NIXL uses the transport that UCX_TLS names (`sm,self,tcp`
within a host, `tcp` over sockets), Mooncake uses TCP. The setup is not timed. The last line is JSON: medians
of GB/s of a batch of all pages, by operation.
"""

import base64
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any, Final, TypeAlias

import numpy as np

NUM_ROUNDS: Final = 7
TARGET: Final = "target"  # the argument that makes a process the other end
READY: Final = "READY"  # begins the line that says how to reach it
HOST: Final = "127.0.0.1"


class Nixl:
    """One end of NIXL, by its UCX backend, with a registered pool."""

    operations = ("WRITE", "READ")

    def __init__(self, name: str, address: int, pool_bytes: int) -> None:
        api: Any = importlib.import_module("nixl._api")
        self._agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
        self._agent.register_memory([(address, pool_bytes, 0, "")], "DRAM")
        self._peer = ""

    def reached_by(self) -> str:
        """Return the word with which the other end connects."""
        return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def meet(self, peer: str) -> None:
        """Connect to the other end."""
        name = self._agent.add_remote_agent(base64.b64decode(peer))
        self._peer = name.decode() if isinstance(name, bytes) else name

    def move(self, operation: str, here: list[int], there: list[int], page_bytes: int) -> float:
        """Move the pages at these addresses; return the seconds."""
        agent = self._agent
        mine, theirs = (
            agent.get_xfer_descs([(page, page_bytes, 0) for page in pages], "DRAM") for pages in (here, there)
        )
        handle = agent.initialize_xfer(operation, mine, theirs, self._peer)
        started_s = perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        taken_s = perf_counter() - started_s
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"nixl: the {operation} ended as {state}")
        return taken_s


class Mooncake:
    """One end of Mooncake's transfer engine over TCP, with a registered pool."""

    operations = ("write", "read")

    def __init__(self, name: str, address: int, pool_bytes: int) -> None:
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        _check("initialize", self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""))
        _check("register_memory", self._engine.register_memory(address, pool_bytes))
        self._peer = ""

    def reached_by(self) -> str:
        return f"{HOST}:{self._engine.get_rpc_port()}"

    def meet(self, peer: str) -> None:
        self._peer = peer

    def move(self, operation: str, here: list[int], there: list[int], page_bytes: int) -> float:
        call = getattr(self._engine, f"batch_transfer_sync_{operation}")
        started_s = perf_counter()
        _check(operation, call(self._peer, here, there, [page_bytes] * len(here)))
        return perf_counter() - started_s


Library: TypeAlias = Nixl | Mooncake
LIBRARIES: Final[dict[str, type[Library]]] = {"nixl": Nixl, "mooncake": Mooncake}


def _check(what: str, code: int) -> None:
    if code:
        raise RuntimeError(f"mooncake: {what} returned {code}")


def main() -> None:
    """Run one end; the source starts the target."""
    name, page_bytes, num_pages = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pool = np.ones(2 * num_pages * page_bytes, dtype=np.uint8)
    address = pool.ctypes.data
    is_target = sys.argv[4:] == [TARGET]
    library: Library = LIBRARIES[name](TARGET if is_target else "source", address, len(pool))
    if is_target:
        sys.stdout.write(f"{READY} {library.reached_by()} {address}\n")
        sys.stdout.flush()
        sys.stdin.read()  # ends with the source
    else:
        sys.stdout.write(f"{json.dumps(measured(library, address, page_bytes, num_pages))}\n")
        sys.stdout.flush()
    os._exit(0)  # does not wait for threads of the library


def measured(library: Library, address: int, page_bytes: int, num_pages: int) -> dict[str, float]:
    """Start the other end and return GB/s by operation."""
    target = subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:4], TARGET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert target.stdout is not None
        said = next((line.split() for line in target.stdout if line.startswith(READY)), None)
        if said is None:
            raise RuntimeError("the other end did not start")
        library.meet(said[1])
        choose = random.Random(0)
        here, there = (
            [base + page * page_bytes for page in choose.sample(range(2 * num_pages), num_pages)]
            for base in (address, int(said[2]))
        )
        rates = {}
        for operation in library.operations:
            taken_s = [library.move(operation, here, there, page_bytes) for _ in range(1 + NUM_ROUNDS)]
            rates[operation.lower()] = num_pages * page_bytes / statistics.median(taken_s[1:]) / 1e9
        return rates
    finally:
        target.kill()
        target.wait()


if __name__ == "__main__":
    main()
