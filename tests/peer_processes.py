"""How tests start tests/process_peer.py in the place of a process of the cluster."""

import sys
from pathlib import Path
from typing import Final

import msgspec

from baton.cluster.process_spec import ProcessSpec

PEER: Final = (sys.executable, str(Path(__file__).with_name("process_peer.py")))


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True):
    log: str = ""  # a file that grows by a byte with every start of "falls"
    num_falls: int = 0


def spec(name: str, *, num_ranks: int = 0, config: PeerConfig | None = None) -> ProcessSpec:
    return ProcessSpec(kind="worker", name=name, config=config or PeerConfig(), num_ranks=num_ranks)
