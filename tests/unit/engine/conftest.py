from collections.abc import Iterator

import pytest
import torch

from tests.forked_ranks import ranks_are_forked
from tests.tensor_parallel_peer import Pair
from tests.tiny_models import tiny_model

__all__ = ["pair", "ranks_are_forked", "tiny_model"]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two ranks of one group, in two processes."""
    torch.set_num_threads(1)
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()
