"""The transports of a rank: names, order, listeners, and one from outside this tree."""

from typing import Literal

import pytest
import torch

from baton.errors import ConfigError
from baton.kvtransfer.protocol.messages import PeerRank, RankListenerAddresses
from baton.kvtransfer.transports.base import LocalRank
from baton.kvtransfer.transports.pages import PageGenerations, SharedPool
from baton.kvtransfer.transports.registry import TRANSPORTS, transport_set
from baton.kvtransfer.transports.tcp import TcpReceiver, TcpSender
from baton.rpc.listener import port_of
from tests.endpoint_host import EndpointHost
from tests.transfer_ends import local_rank

HERE, THERE = "one host", "another"
OUTSIDE = f"{__name__}:OutsideTransport"


class OutsideTransport:
    """A transport that this tree does not know: TCP under another name, between CPUs."""

    name = "outside"
    is_automatic = False

    def can_serve(self, source: RankListenerAddresses, destination: RankListenerAddresses) -> bool:
        return source.device == destination.device == "cpu"

    def listen(self, rank: LocalRank) -> TcpReceiver:
        return TcpReceiver(rank)

    def connect(self, rank: LocalRank, peer: PeerRank) -> TcpSender:
        return TcpSender(rank, (peer.host, port_of(peer.listeners.addresses[self.name])))


def at(device: Literal["cpu", "cuda"], host: str = HERE, *names: str) -> RankListenerAddresses:
    """A rank that listens with these transports, or with all."""
    addresses = dict.fromkeys(names or (*TRANSPORTS, "outside"), "1")
    return RankListenerAddresses(incarnation=b"i" * 16, host=host, device=device, addresses=addresses)


def order(
    source: RankListenerAddresses, destination: RankListenerAddresses, asked: str = "auto"
) -> list[str]:
    return [each.name for each in transport_set(asked).order(source, destination)]


@pytest.mark.parametrize(
    ("source", "destination", "asked", "expected"),
    [
        (at("cpu"), at("cpu"), "auto", ["shm", "tcp"]),
        (at("cpu"), at("cpu", THERE), "auto", ["tcp"]),
        (at("cuda"), at("cuda"), "auto", ["cuda_ipc", "nccl", "tcp"]),
        (at("cuda"), at("cuda", THERE), "auto", ["nccl", "tcp"]),
        (at("cuda"), at("cpu"), "auto", ["tcp"]),
        (at("cpu", THERE), at("cuda"), "auto", ["tcp"]),
        (at("cpu"), at("cpu", HERE, "tcp"), "auto", ["tcp"]),
        (at("cpu"), at("cpu", HERE, "none of ours"), "auto", []),
        (at("cpu"), at("cpu"), "gloo", ["gloo", "tcp"]),
        (at("cpu"), at("cpu", THERE), "nixl", ["nixl", "tcp"]),
        (at("cuda"), at("cuda", THERE), "mooncake", ["mooncake", "tcp"]),
        (at("cpu"), at("cpu"), "tcp", ["tcp"]),
        (at("cuda"), at("cuda"), "nccl", ["nccl", "tcp"]),
        (at("cpu"), at("cpu", THERE), OUTSIDE, ["outside", "tcp"]),
    ],
)
def test_order_follows_the_places_of_the_ranks_and_the_setting(
    source: RankListenerAddresses, destination: RankListenerAddresses, asked: str, expected: list[str]
) -> None:
    assert order(source, destination, asked) == expected


@pytest.mark.parametrize(
    ("asked", "destination"),
    [("shm", at("cpu", THERE)), ("nccl", at("cpu")), ("nixl", at("cuda")), (OUTSIDE, at("cuda"))],
)
def test_transport_that_cannot_serve_the_ranks_is_refused(
    asked: str, destination: RankListenerAddresses
) -> None:
    with pytest.raises(ConfigError, match="cannot serve cpu on host one host to"):
        order(at("cpu"), destination, asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("glo", "did you mean 'gloo'"),
        ("rdma", "expected one of auto, shm"),
        ("no.such.module:Transport", "cannot be imported"),
        ("math:NoSuchTransport", "cannot be imported"),
        ("math:floor", "is no Transport: it lacks can_serve"),
        (":", "cannot be imported"),
    ],
)
def test_name_of_no_transport_is_refused(asked: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transport_set(asked)


def listening(asked: str, rank: LocalRank) -> list[str]:
    listeners = transport_set(asked).listen(rank)
    for listener in listeners.values():
        listener.close()
    return list(listeners)


@pytest.mark.parametrize(
    ("asked", "is_shared", "names"),
    [
        ("auto", False, ["tcp"]),
        ("auto", True, ["shm", "tcp"]),
        ("gloo", True, ["shm", "gloo", "tcp"]),
        (OUTSIDE, False, ["outside", "tcp"]),
    ],
)
def test_rank_on_a_cpu_listens_with_the_transports_that_reach_it(
    asked: str, is_shared: bool, names: list[str]
) -> None:
    shared = SharedPool()
    shape = (4, 1024)
    pages = shared.zeros(shape, torch.uint8) if is_shared else torch.zeros(shape, dtype=torch.uint8)
    assert listening(asked, local_rank(pages, shared=shared if is_shared else None)) == names
    shared.close()


@pytest.mark.parametrize("has_nccl", [True, False])
def test_rank_on_a_gpu_listens_with_the_transports_that_reach_it(
    has_nccl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's pool stands in for a GPU's."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    rank = local_rank(torch.zeros((4, 1024), dtype=torch.uint8))
    rank.device, rank.generations = "cuda", PageGenerations(4)
    assert listening("gloo", rank) == (["cuda_ipc", "nccl", "tcp"] if has_nccl else ["cuda_ipc", "tcp"])
    rank.close()


def test_pages_move_over_a_transport_from_outside_the_tree() -> None:
    source, destination = (EndpointHost(is_shared=True, transport=OUTSIDE) for _ in range(2))
    source.fill(1)
    assert source.send(destination, 24) == "handed_over"
    assert source.transports()["outside"] == 1
    for host in (source, destination):
        host.close()
