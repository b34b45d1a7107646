import socket

import pytest

from baton.cluster.ports import KeptPort
from baton.errors import ConfigError

LOOPBACK = "127.0.0.1"


def listen(port: int, option: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, option, 1)
    sock.bind((LOOPBACK, port))
    sock.listen()
    return sock


@pytest.mark.parametrize(("option", "num_listeners"), [(socket.SO_REUSEADDR, 1), (socket.SO_REUSEPORT, 3)])
def test_those_it_is_kept_for_can_listen_again_and_again(option: int, num_listeners: int) -> None:
    with KeptPort(LOOPBACK, 0, option) as port:
        for _ in range(2):
            listening = [listen(port.number, option) for _ in range(num_listeners)]
            with socket.create_connection((LOOPBACK, port.number), 1.0):
                pass
            for sock in listening:
                sock.close()


def test_a_kept_port_accepts_nobody_by_itself() -> None:
    with KeptPort(LOOPBACK, 0, socket.SO_REUSEPORT) as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port.number), 1.0)


def test_a_port_in_use_is_told() -> None:
    with listen(0, socket.SO_REUSEPORT) as other:
        number = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: {number} on 127.0.0.1 is in use"):
            KeptPort(LOOPBACK, number, socket.SO_REUSEPORT)


def test_an_address_of_elsewhere_is_told() -> None:
    with pytest.raises(ConfigError, match="host: 203.0.113.1 cannot be listened on"):
        KeptPort("203.0.113.1", 0, socket.SO_REUSEPORT)
