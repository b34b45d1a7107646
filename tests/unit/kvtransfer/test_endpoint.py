"""The loop of an endpoint's owner: posted calls and waits for them, and requests with extreme values."""

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from baton.engine.cache.page_pool import PagePool
from baton.kvtransfer.endpoint import EndpointSettings, KvEndpoint
from tests.layouts import a_layout
from tests.transfer_ends import RING
from tests.waiting import wait_for

# `SimpleQueue.get` of Python 3.11 hangs within some ten thousand such waits.
NUM_WAITS = 30_000
SOON_S = 60.0


def make_endpoint() -> KvEndpoint:
    layout = a_layout(page_size=4, num_layers=1)
    settings = EndpointSettings(keys=RING, fingerprint="model", layout=layout)
    return KvEndpoint(settings, torch.zeros((4, 1, 2, 2, 4, 8)), PagePool(4, 4))


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


def test_very_short_deadline_keeps_the_link(endpoint: KvEndpoint) -> None:
    with closing(make_endpoint()) as source:
        endpoint.grant(endpoint.link(source.address), b"t" * 16, 1, "sequence", deadline_s=1e-4)

        def has_arrived() -> bool:
            endpoint.poll()
            source.poll()
            return bool(source.take_granted() or source.dropped.counts())

        wait_for(has_arrived)
        assert not source.dropped.counts()
