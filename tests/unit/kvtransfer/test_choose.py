import pytest

from baton.errors import ConfigError, TransferFailed
from baton.kvtransfer.choose import Place, TransportCounters, TransportName, open_first, order, this_host
from baton.kvtransfer.transport import Piece, Progress

HERE, THERE = "one host", "another"
ALL = ("shm", "cuda_ipc", "nccl", "gloo", "tcp")


def cpu(host: str = HERE) -> Place:
    return Place(host=host, device="cpu")


def gpu(host: str = HERE) -> Place:
    return Place(host=host, device="cuda")


@pytest.mark.parametrize(
    ("source", "destination", "expected"),
    [
        (cpu(), cpu(), ("shm", "tcp")),
        (cpu(), cpu(THERE), ("tcp",)),
        (gpu(), gpu(), ("cuda_ipc", "nccl", "tcp")),
        (gpu(), gpu(THERE), ("nccl", "tcp")),
        (gpu(), cpu(), ("tcp",)),
        (cpu(THERE), gpu(), ("tcp",)),
    ],
)
def test_auto_goes_by_place(source: Place, destination: Place, expected: tuple[str, ...]) -> None:
    assert order(source, destination, ALL) == expected


def test_only_what_the_destination_offers_is_tried() -> None:
    assert order(cpu(), cpu(), ["tcp"]) == ("tcp",)
    assert order(cpu(), cpu(), []) == ()


def test_a_transport_that_was_asked_for_comes_first_and_tcp_after_it() -> None:
    assert order(cpu(), cpu(), ALL, "gloo") == ("gloo", "tcp")
    assert order(cpu(), cpu(), ALL, "tcp") == ("tcp",)
    assert order(gpu(), gpu(), ALL, "nccl") == ("nccl", "tcp")


@pytest.mark.parametrize(
    ("asked", "destination", "message"),
    [
        ("shm", cpu(THERE), "cannot serve"),
        ("nccl", cpu(), "cannot serve"),
        ("rdma", cpu(), "expected one of"),
    ],
)
def test_what_cannot_be_is_refused_by_name(asked: str, destination: Place, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        order(cpu(), destination, ALL, asked)


class FakeTransport:
    def __init__(self, name: str, opens: bool) -> None:
        self.name = name
        self.is_closed = False
        self._opens = opens

    is_broken = False

    def open(self) -> None:
        if not self._opens:
            raise TransferFailed(f"{self.name} is not to be had")

    def push(self, piece: Piece) -> int:
        raise NotImplementedError

    def poll(self, ticket: int) -> Progress:
        raise NotImplementedError

    def forget(self, ticket: int) -> None:
        raise NotImplementedError

    def abort(self, transfer: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.is_closed = True


def test_what_does_not_open_makes_way_and_is_counted() -> None:
    made: list[FakeTransport] = []
    failures: list[str] = []

    def make(name: TransportName) -> FakeTransport:
        made.append(FakeTransport(name, opens=name == "tcp"))
        return made[-1]

    counters = TransportCounters()
    only_tcp: tuple[TransportName, ...] = ("tcp",)
    only_shm: tuple[TransportName, ...] = ("shm",)
    transport = open_first(("shm", "tcp"), make, counters, lambda name, _: failures.append(name))
    assert transport is made[1] and made[0].is_closed and not made[1].is_closed
    assert open_first(only_tcp, make, counters, lambda *_: None) is made[2]
    assert open_first(only_shm, make, counters, lambda *_: None) is None
    assert failures == ["shm"]
    assert (counters.num_opened["tcp"], counters.num_failed["shm"]) == (2, 2)
    assert (counters.num_fallbacks, counters.num_recomputes) == (1, 1)


def test_a_host_is_itself() -> None:
    assert this_host() == this_host() != ""
