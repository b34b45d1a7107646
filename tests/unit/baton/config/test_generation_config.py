from pathlib import Path

import pytest

from baton.config.generation_config import GenerationConfig, read_sampling_defaults
from baton.errors import ModelError
from baton.request import SamplingParams

FILE = '{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": null, "max_new_tokens": 9, "x": 1}'


def test_generation_config_gives_defaults(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(FILE)
    expected = SamplingParams(temperature=0.6, top_k=20, max_tokens=9)
    assert read_sampling_defaults(tmp_path) == read_sampling_defaults(tmp_path, max_tokens=16) == expected


def test_setting_ignores_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(FILE)
    assert read_sampling_defaults(tmp_path, "vllm") == SamplingParams(max_tokens=None)


def test_override_goes_before_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(FILE)
    override = GenerationConfig(temperature=0.0, min_p=0.1)
    expected = SamplingParams(temperature=0.0, top_k=20, min_p=0.1, max_tokens=9)
    assert read_sampling_defaults(tmp_path, "auto", override) == expected
    expected = SamplingParams(temperature=0.0, min_p=0.1, max_tokens=None)
    assert read_sampling_defaults(tmp_path, "vllm", override) == expected


def test_model_without_files_has_the_defaults_of_vllm(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path, max_tokens=16) == SamplingParams()


@pytest.mark.parametrize("text", ["{", "[]", '{"temperature": "hot"}', '{"top_p": 2.0}'])
def test_damaged_generation_config_is_named_with_the_setting(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json.*generation_config=vllm"):
        read_sampling_defaults(tmp_path)
