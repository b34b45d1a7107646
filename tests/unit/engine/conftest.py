from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
import torch

from tests.forked_ranks import forked_ranks
from tests.tensor_parallel_peer import Pair
from tests.tiny_models import tiny_model

__all__ = ["pair", "tiny_model"]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two ranks of one group, in two processes."""
    torch.set_num_threads(1)
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def ranks_are_forked() -> Iterator[None]:
    forkserver.ensure_running()  # before a test that looks at the children of its process
    with forked_ranks():
        yield
