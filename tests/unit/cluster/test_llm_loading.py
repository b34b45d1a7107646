"""What an LLM is made of, and what is said when it cannot be."""

import shutil
from pathlib import Path

import pytest

from baton.cluster.model_directory import resolve_model
from baton.cluster.offline.llm import LLM
from baton.errors import ConfigError, ModelError
from tests.unit.cluster.model_directories import with_pickled_weights

MEMORY = {"kv_cache_memory_bytes": "64MiB"}


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'max_model_length'; did you mean 'max_model_len'"):
        LLM("tiny", max_model_length=128)
    with pytest.raises(ConfigError, match="'cache.pagesize'; did you mean 'cache.page_size'"):
        LLM("tiny", cache={"pagesize": 16})


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pickle can run any code"):
        LLM(with_pickled_weights(tmp_path))


def test_a_directory_that_is_no_model_lacks_its_config_first(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="config.json"):
        LLM(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ModelError, match="'GPT2LMHeadModel' is not known; known are LlamaForCausalLM"):
        LLM(tmp_path)
    shutil.copy(resolve_model("tiny") / "config.json", tmp_path)
    with pytest.raises(ModelError, match="tokenizer.json: there is no such file"):
        LLM(tmp_path)


def test_loading_reports_its_progress() -> None:
    seen: list[tuple[int, int]] = []
    LLM("tiny", cache=MEMORY, load_progress=lambda done, total: seen.append((done, total))).close()
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] > 2**20
