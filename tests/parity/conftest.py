from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from baton.engine.engine import Engine
from tests.forked_ranks import forked_ranks
from tests.parity.models import CASES, EVEN_EXPERTS, MODEL, save_model
from tests.parity.runs import engine
from tests.parity.scripted_policy import WORDS, Words


@pytest.fixture(scope="module", autouse=True)
def _ranks_are_forked() -> Iterator[None]:
    with forked_ranks():
        yield


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.dtype], Path]:
    """The directory of a case's model in a dtype, made once a session."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def directory(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in made:
            case = next(case for case in (*CASES, *EVEN_EXPERTS) if case.name == name)
            made[name, dtype] = tmp_path_factory.mktemp("model") / name
            save_model(case, made[name, dtype], dtype)
        return made[name, dtype]

    return directory


@pytest.fixture(scope="session")
def oracle(model_directory: Callable[..., Path]) -> Iterator[Engine]:
    """One engine, with which clusters of the same model are compared."""
    with engine(model_directory(MODEL)) as made:
        yield made


@pytest.fixture
def words() -> Iterator[dict[str, Words]]:
    """The router's choices, by request."""
    yield WORDS
    WORDS.clear()
