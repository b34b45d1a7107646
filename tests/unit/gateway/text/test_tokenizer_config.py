import json
from pathlib import Path

import pytest

from baton.errors import ModelError
from baton.gateway.text.model_files import MAX_FILE_BYTES, TokenizerConfig, read_text, read_tokenizer_config


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
