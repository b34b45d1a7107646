from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.parity.models import CASES, save_model


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.dtype], Path]:
    """The directory of a case's model in a dtype, made once a session."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def directory(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in made:
            case = next(case for case in CASES if case.name == name)
            made[name, dtype] = tmp_path_factory.mktemp("model") / name
            save_model(case, made[name, dtype], dtype)
        return made[name, dtype]

    return directory
