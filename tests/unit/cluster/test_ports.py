import socket
from pathlib import Path

import pytest

from baton.cluster import ports as module
from baton.cluster.ports import KeptPort, ListeningProcess, listeners
from baton.errors import ConfigError

LOOPBACK = "127.0.0.1"


def listen(port: int, option: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, option, 1)
    sock.bind((LOOPBACK, port))
    sock.listen()
    return sock


@pytest.mark.parametrize(("option", "num_listeners"), [(socket.SO_REUSEADDR, 1), (socket.SO_REUSEPORT, 3)])
def test_processes_can_listen_on_a_kept_port(option: int, num_listeners: int) -> None:
    with KeptPort(LOOPBACK, 0, option) as port:
        for _ in range(2):
            listening = [listen(port.number, option) for _ in range(num_listeners)]
            with socket.create_connection((LOOPBACK, port.number), 1.0):
                pass
            for sock in listening:
                sock.close()


def test_kept_port_accepts_no_connection_by_itself() -> None:
    with KeptPort(LOOPBACK, 0, socket.SO_REUSEPORT) as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port.number), 1.0)


def test_port_in_use_is_refused() -> None:
    with listen(0, socket.SO_REUSEPORT) as other:
        number = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: {number} on 127.0.0.1 is in use"):
            KeptPort(LOOPBACK, number, socket.SO_REUSEPORT)


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="host: 203.0.113.1 cannot be listened on"):
        KeptPort("203.0.113.1", 0, socket.SO_REUSEPORT)


REST = " 00:00000000 00000000  1000        0 4711 1 0000000000000000 100 0 0 10 0\n"  # with the inode


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no /proc")
def test_listening_socket_is_found_and_bound_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        found = listeners()
        assert ListeningProcess(*server.getsockname()) in found
        assert ListeningProcess(*bound.getsockname()) not in found


def test_addresses_of_both_families_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
