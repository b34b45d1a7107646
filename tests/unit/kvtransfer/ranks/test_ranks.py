"""An endpoint and its ranks: as many as its layout says, with the keys of the cluster."""

import contextlib
import socket
import threading
from typing import Any

import pytest
import torch

from baton.engine.cache.page_pool import PagePool
from baton.errors import ConfigError
from baton.kvtransfer import endpoint as endpoint_module
from baton.kvtransfer.endpoint import EndpointSettings, KvEndpoint
from baton.kvtransfer.links import Peers
from baton.kvtransfer.protocol.messages import EndpointHello
from baton.kvtransfer.ranks.ranks import RankAgents
from baton.messages.bounds import Kind
from baton.rpc.auth import PAGES, KeyRing, LinkKeys, Role
from baton.rpc.connection import Connection
from tests.layouts import a_layout
from tests.transfer_ends import RING
from tests.waiting import wait_for


@pytest.mark.parametrize(("num_ranks", "num_agents"), [(2, None), (2, 1), (1, 2)])
def test_ranks_that_are_not_as_many_as_the_layout_says_are_refused(
    num_ranks: int, num_agents: int | None
) -> None:
    threads = set(threading.enumerate())
    layout = a_layout(tp_size=num_ranks, page_size=4, num_layers=1)
    settings = EndpointSettings(keys=RING, fingerprint="model", layout=layout)
    pool = torch.zeros((4, 1, 2, layout.heads_per_rank, 4, 8))
    agents = None if num_agents is None else RankAgents(num_agents)
    with pytest.raises(ConfigError, match=f"{num_agents or 1} ranks have agents, the layout has {num_ranks}"):
        KvEndpoint(settings, pool, PagePool(4, 4), agents=agents)
    wait_for(lambda: set(threading.enumerate()) <= threads)


def test_keys_that_change_while_an_endpoint_is_made_reach_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, changed = (KeyRing.of(key * 32, Kind.WORKER) for key in (b"o", b"n"))
    offered: list[EndpointHello] = []

    def change_keys(
        address: tuple[str, int], secret: Any, hello: EndpointHello, *rest: Any, **kw: Any
    ) -> Peers:
        offered.append(hello)
        ring.replace(changed.generations)
        return Peers(address, secret, hello, *rest, **kw)

    monkeypatch.setattr(endpoint_module, "Peers", change_keys)
    layout = a_layout(page_size=4, num_layers=1)
    settings = EndpointSettings(keys=ring, fingerprint="model", layout=layout)
    with contextlib.closing(
        KvEndpoint(settings, torch.zeros((4, 1, 2, 2, 4, 8)), PagePool(4, 4))
    ) as endpoint:
        endpoint.poll()
        source = socket.create_connection((settings.host, int(offered[0].listeners[0].addresses["tcp"])))
        with contextlib.closing(Connection(source, LinkKeys(changed, PAGES), Role.CONNECTING)) as connection:
            connection.handshake(5.0)  # WireError: another key
