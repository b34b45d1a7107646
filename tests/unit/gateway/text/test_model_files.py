import json
from pathlib import Path

import pytest

from baton.errors import ModelError
from baton.gateway.text.model_files import (
    MAX_FILE_BYTES,
    TokenizerConfig,
    read_sampling_defaults,
    read_text,
    read_tokenizer_config,
    read_vocab_size,
)
from baton.request import SamplingParams

FILE = '{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": null, "max_new_tokens": 9, "x": 1}'


def test_generation_config_gives_defaults_and_a_cap(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(FILE)
    defaults = read_sampling_defaults(tmp_path)
    assert defaults.given() == {"temperature": 0.6, "top_k": 20}
    assert [defaults.capped(asked) for asked in (None, 4, 100)] == [9, 4, 9]
    assert defaults.sampling() == SamplingParams(temperature=0.6, top_k=20, max_tokens=9)


def test_setting_turns_it_off(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(FILE)
    defaults = read_sampling_defaults(tmp_path, "vllm")
    assert defaults.given() == {} and defaults.capped(None) is None and defaults.capped(100) == 100


def test_model_without_the_file_has_vllms_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path).sampling() == SamplingParams()
    assert read_vocab_size(tmp_path) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"temperature": "hot"}', '{"top_p": 2.0}'])
def test_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json.*generation_config=vllm"):
        read_sampling_defaults(tmp_path)


def test_vocabulary_is_the_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 77, "hidden_size": 8}')
    assert read_vocab_size(tmp_path) == 77


def test_tokens_are_strings_or_objects_with_their_content(tmp_path: Path) -> None:
    config = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False},
        "unk_token": None,
        "model_max_length": 1e30,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_tokenizer_config(tmp_path).special_tokens() == {"bos_token": "<s>", "eos_token": "</s>"}


def test_an_absent_file_says_nothing(tmp_path: Path) -> None:
    assert read_tokenizer_config(tmp_path) == TokenizerConfig()


def test_a_damaged_file_names_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(ModelError, match=r"tokenizer_config.json: .*chat_template"):
        read_tokenizer_config(tmp_path)


def test_texts_are_bounded_and_must_be_utf8(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ModelError, match="latin: cannot be read"):
        read_text(tmp_path / "latin")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ModelError, match="huge: should be at most"):
        read_text(tmp_path / "huge")
    assert read_text(tmp_path / "absent") is None
