"""The loop of an endpoint's owner: posted calls and waits for them, and requests with extreme values."""

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from baton.engine.cache.page_pool import PagePool
from baton.kvtransfer.endpoint import EndpointSettings, KvEndpoint
from baton.kvtransfer.protocol.messages import MAX_DIGESTS, MAX_PAGES, Grant
from tests.layouts import a_layout
from tests.transfer_ends import RING
from tests.waiting import wait_for

# `SimpleQueue.get` of Python 3.11 hangs within some ten thousand such waits.
NUM_WAITS = 30_000
SOON_S = 60.0


def make_endpoint(num_layers: int = 1) -> KvEndpoint:
    layout = a_layout(page_size=4, num_layers=num_layers)
    settings = EndpointSettings(keys=RING, fingerprint="model", layout=layout)
    return KvEndpoint(settings, torch.zeros((4, num_layers, 2, 2, 4, 8)), PagePool(4, 4))


@pytest.fixture
def endpoint() -> Iterator[KvEndpoint]:
    with closing(make_endpoint()) as made:
        yield made


def test_short_wait_ends_without_a_call(endpoint: KvEndpoint) -> None:
    def wait_often() -> None:
        for _ in range(NUM_WAITS):
            endpoint.post(lambda: None)
            endpoint.wait(1.0)
            endpoint.wait(1e-6)

    waiting = threading.Thread(target=wait_often, daemon=True)
    waiting.start()
    waiting.join(SOON_S)
    hangs = waiting.is_alive()
    endpoint.post(lambda: None)
    assert not hangs


def takes_grant(source: KvEndpoint, destination: KvEndpoint) -> bool:
    """Wait until a grant has come; return False when the source has dropped the peer because of it."""

    def has_arrived() -> bool:
        destination.poll()
        source.poll()
        return bool(source.take_granted() or source.dropped.counts())

    wait_for(has_arrived)
    return not source.dropped.counts()


def test_very_short_deadline_keeps_the_link(endpoint: KvEndpoint) -> None:
    with closing(make_endpoint()) as source:
        endpoint.grant(endpoint.link(source.address), b"t" * 16, 1, "sequence", deadline_s=1e-4)
        assert takes_grant(source, endpoint)


def test_grant_of_too_many_units_in_all_shards_drops_the_link() -> None:
    """Units and groups of layers are each within their limits."""
    num_groups = MAX_DIGESTS // MAX_PAGES + 1
    grant = Grant(
        transfer=b"t" * 16,
        epoch=1,
        deadline_ms=10_000,
        num_units=MAX_PAGES,
        pages=tuple(range(MAX_PAGES)),
        generations=(1,) * MAX_PAGES,
        num_layer_groups=num_groups,
    )
    with closing(make_endpoint(num_groups)) as source, closing(make_endpoint(num_groups)) as peer:
        peer.link(source.address).send(grant)
        assert not takes_grant(source, peer)
        assert source.dropped.counts() == {"protocol": 1}
        assert source.num_open == 0
