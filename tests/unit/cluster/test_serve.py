import os
import socket
import time
from pathlib import Path

import pytest

from baton.cluster.serve import COMPILING, LONGEST_COMPILATION_S, are_compiled_now, kept_port
from baton.errors import ConfigError
from baton.kernels import native

LOOPBACK = "127.0.0.1"


def listen(port: int, option: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, option, 1)
    sock.bind((LOOPBACK, port))
    sock.listen()
    return sock


@pytest.mark.parametrize(("option", "num_listeners"), [(socket.SO_REUSEADDR, 1), (socket.SO_REUSEPORT, 3)])
def test_processes_can_listen_on_a_kept_port(option: int, num_listeners: int) -> None:
    with kept_port(LOOPBACK, 0, option) as kept:
        port = kept.getsockname()[1]
        for _ in range(2):
            listening = [listen(port, option) for _ in range(num_listeners)]
            with socket.create_connection((LOOPBACK, port), 1.0):
                pass
            for sock in listening:
                sock.close()


def test_kept_port_accepts_no_connection_by_itself() -> None:
    with kept_port(LOOPBACK, 0, socket.SO_REUSEPORT) as kept, pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, kept.getsockname()[1]), 1.0)


def test_port_in_use_is_refused() -> None:
    with listen(0, socket.SO_REUSEPORT) as other:
        number = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: {number} on 127.0.0.1 is in use"):
            kept_port(LOOPBACK, number, socket.SO_REUSEPORT)


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="host: 203.0.113.1 cannot be listened on"):
        kept_port("203.0.113.1", 0, socket.SO_REUSEPORT)


def test_kernels_are_compiled_while_their_folder_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "none"))
    assert not are_compiled_now()
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    (tmp_path / "kernels-0.so").touch()
    assert not are_compiled_now()
    folder = tmp_path / f"{native.COMPILING}x"
    folder.mkdir()
    assert folder.match(COMPILING) and are_compiled_now()
    left_s = time.time() - LONGEST_COMPILATION_S - 1
    os.utime(folder, (left_s, left_s))
    assert not are_compiled_now()
