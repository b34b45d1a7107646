import os
import socket
from pathlib import Path

import pytest

from baton.cluster import ports as module
from baton.cluster.ports import ListeningProcess, listeners, processes

REST = " 00:00000000 00000000  1000        0 4711 1 0000000000000000 100 0 0 10 0\n"  # with the inode


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no /proc")
def test_whoever_listens_is_found_and_who_does_not_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        found = listeners()
        assert ListeningProcess(*server.getsockname()) in found
        assert ListeningProcess(*bound.getsockname()) not in found


def test_addresses_of_both_kinds_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = "  sl  local_address rem_address   st tx_queue\n"
    (tmp_path / "tcp").write_text(
        header
        + "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000"
        + REST
        + "   1: 00000000:2049 00000000:0000 0A 00000000:00000000"
        + REST
        + "   2: 0100007F:0050 0100007F:D431 01 00000000:00000000"
        + REST
    )
    (tmp_path / "tcp6").write_text(
        header
        + "   0: 00000000000000000000000001000000:0016 00000000000000000000000000000000:0000 0A 0:0"
        + REST
        + "   1: 0000000000000000FFFF00000100007F:0017 00000000000000000000000000000000:0000 0A 0:0"
        + REST
    )
    monkeypatch.setattr(module, "TABLES", (tmp_path / "tcp", tmp_path / "tcp6"))
    assert set(listeners()) == {("127.0.0.1", 8000), ("0.0.0.0", 8265), ("::1", 22), ("127.0.0.1", 23)}


def test_a_listeners_process_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        here = ListeningProcess(*listening.getsockname())
        assert processes()[here] == os.getpid()
    assert here not in processes()
