import json
from pathlib import Path
from typing import cast

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from baton.errors import InvalidRequest, ModelError
from baton.gateway.text.model_files import TokenizerConfig
from baton.gateway.text.tokenizer import Tokenizer
from tests.unit.gateway import tiny_tokenizers

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level(), TokenizerConfig())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "</s>", "lstrip": False}, "bos_token": "<s>", "pad_token": None})
    )
    return tmp_path


@given(text=st.text())
def test_decoding_undoes_encoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_directory_as_transformers_writes_it(tmp_path: Path) -> None:
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizers.byte_level(), eos_token="</s>", bos_token="<s>"
    )
    oracle.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    text = "the café 😀</s>"
    assert tokenizer.encode(text) == oracle.encode(text)
    assert tokenizer.eos_token_id == oracle.eos_token_id
    assert tokenizer.vocab_size == len(oracle)


def test_special_tokens(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    token_ids = tokenizer.encode("a</s>")
    assert token_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(token_ids) == "a"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "a</s>"


def test_without_a_tokenizer_config_there_is_no_end_token(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()
    assert Tokenizer.from_directory(directory).eos_token_id is None


def test_truncation_and_padding_of_the_file_are_not_taken_over() -> None:
    inner = tiny_tokenizers.byte_level()
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    tokenizer = Tokenizer(inner, TokenizerConfig())
    text = "a long enough text"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_ids_of_a_padded_vocabulary_have_no_text() -> None:
    assert TOKENIZER.decode([TOKENIZER.vocab_size + 5]) == ""


def test_half_a_surrogate_pair_is_the_clients_fault() -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        TOKENIZER.encode("a\ud83d")


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match="tokenizer.json: there is no such file"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("content", [b"{}", b"", b"\xff\xfe"])
def test_a_damaged_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match="tokenizer.json: (is not a tokenizer|cannot be read)"):
        Tokenizer.from_directory(tmp_path)


DAMAGED_PARTS = {
    "damaged when read": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "panic": {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    "error": {"model": {"type": "WordLevel", "unk_token": "x", "vocab": {}}},
}


@pytest.mark.parametrize("part", DAMAGED_PARTS)
def test_a_tokenizer_that_fails_inside_is_the_models_fault(directory: Path, part: str) -> None:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | DAMAGED_PARTS[part]))
    with pytest.raises(ModelError, match="is not a tokenizer: |fails to encode: "):
        Tokenizer.from_directory(directory).encode("hello world")


class Failing:
    """A tokenizer of the library's kind that decodes nothing."""

    decoder = None

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def decode(self, token_ids: object, *, skip_special_tokens: bool) -> str:
        raise self._error


class PanicException(BaseException):
    """As pyo3 calls its own."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PanicException("x"), ModelError),
        (ValueError("x"), ModelError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_failure_to_decode_is_the_models_fault(error: BaseException, expected: type[BaseException]) -> None:
    inner = cast(tokenizers.Tokenizer, Failing(error))
    with pytest.raises(expected):
        Tokenizer(inner, TokenizerConfig()).decode([1])


@pytest.mark.parametrize("content", ["{", '{"eos_token": 3}', "[]"])
def test_a_damaged_tokenizer_config(directory: Path, content: str) -> None:
    (directory / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match="tokenizer_config.json: "):
        Tokenizer.from_directory(directory)
