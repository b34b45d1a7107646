import pytest

from baton.errors import ConfigError
from baton.kvtransfer.transports.registry import RankLocation, TransportCounters, order, this_host

HERE, THERE = "one host", "another"
ALL = ("shm", "cuda_ipc", "nccl", "gloo", "tcp")


def cpu(host: str = HERE) -> RankLocation:
    return RankLocation(host=host, device="cpu")


def gpu(host: str = HERE) -> RankLocation:
    return RankLocation(host=host, device="cuda")


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
def test_auto_goes_by_place(
    source: RankLocation, destination: RankLocation, expected: tuple[str, ...]
) -> None:
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
def test_what_cannot_be_is_refused_by_name(asked: str, destination: RankLocation, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        order(cpu(), destination, ALL, asked)


def test_whatever_opens_after_another_is_a_fallback() -> None:
    counters = TransportCounters()
    counters.failed("shm")
    counters.opened("tcp", num_before=1)
    counters.opened("tcp", num_before=0)
    counters.recomputed()
    expected = {"opened_tcp": 2, "failed_shm": 1, "fallbacks": 1, "recomputes": 1}
    assert counters.by_name() == expected


def test_a_host_is_itself() -> None:
    assert this_host() == this_host() != ""
