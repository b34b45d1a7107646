from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tensor_parallel_peer import Pair
from tests.tiny_models import write_config


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model with a config and no weights."""
    return write_config(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two ranks of one group, in two processes."""
    torch.set_num_threads(1)
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()
