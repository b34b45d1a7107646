"""An endpoint has as many ranks as its layout says, or there is none."""

import threading

import pytest
import torch

from baton.engine.pages import PagePool
from baton.errors import ConfigError
from baton.kvtransfer.endpoint import KvEndpoint
from baton.kvtransfer.endpoint_settings import EndpointSettings
from baton.kvtransfer.rank_agents import RankAgents
from baton.layout import PageLayout
from tests.transfer_ends import wait_for


@pytest.mark.parametrize(("num_ranks", "num_agents"), [(2, None), (2, 1), (1, 2)])
def test_ranks_that_are_not_as_many_as_the_layout_says_are_refused(
    num_ranks: int, num_agents: int | None
) -> None:
    threads = set(threading.enumerate())
    layout = PageLayout(
        tp_size=num_ranks, page_size=4, num_layers=1, num_kv_heads=2, head_dim=8, dtype="float32"
    )
    settings = EndpointSettings(key=b"k" * 32, fingerprint="model", layout=layout)
    pool = torch.zeros((4, 1, 2, layout.heads_per_rank, 4, 8))
    agents = None if num_agents is None else RankAgents(num_agents)
    with pytest.raises(ConfigError, match=f"{num_agents or 1} ranks have agents, the layout has {num_ranks}"):
        KvEndpoint(settings, pool, PagePool(4, 4), agents=agents)
    wait_for(lambda: set(threading.enumerate()) <= threads)
