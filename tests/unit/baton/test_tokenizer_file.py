"""Models that have a SentencePiece model alone give the tokens that SentencePiece gives."""

import json
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Final

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from baton.errors import ModelError
from baton.gateway.text.tokenizer import Tokenizer
from baton.tokenizer_file import MAX_FILE_BYTES, has_tokenizer, read_text, read_tokenizer, read_vocab_size
from tests.unit.gateway.tiny_tokenizers import TEXT

TEXTS: Final = [
    *TEXT,
    "the lazy dog",
    " a leading space and\ta tab",
    "two  spaces",
    "never seen: Ω≈ç√∫ 🦊",
    "x",
    "",
]
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "unigram": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"},
    "normalised": {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": True},
    "no prefix": {"model_type": "unigram", "byte_fallback": True, "add_dummy_prefix": False},
}


def train(directory: Path, **settings: Any) -> SentencePieceProcessor:
    """Write a SentencePiece model like that of Llama 2 into the directory, and the files that name it."""
    text = directory / "text"
    text.write_text("\n".join(TEXT * 4))
    SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=330,
        minloglevel=2,
        **{"remove_extra_whitespaces": False, **settings},
    )
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    keys = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True, "bos_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(keys))
    return SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))


@pytest.mark.parametrize("kind", SETTINGS)
def test_converted_tokenizer_gives_the_tokens_and_text_of_sentencepiece(kind: str, tmp_path: Path) -> None:
    oracle = train(tmp_path, **SETTINGS[kind])
    assert has_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.vocab_size == oracle.vocab_size()
    for text in TEXTS:
        expected = oracle.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.decode(expected) == oracle.decode(expected), text
        detokenizer = tokenizer.detokenizer()
        assert "".join([*map(detokenizer.push, expected), detokenizer.finish()]) == oracle.decode(expected)
    assert tokenizer.encode("x")[0] == oracle.bos_id()


def test_added_tokens_have_their_ids(tmp_path: Path) -> None:
    oracle = train(tmp_path, **SETTINGS["bpe"], user_defined_symbols=["<tool>"])
    num_pieces = oracle.vocab_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": num_pieces}))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {str(num_pieces + 1): {"content": "<|end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_eos_token": True}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = [oracle.piece_to_id("<tool>"), num_pieces, num_pieces + 1]
    assert tokenizer.encode("<tool><pad><|end|>") == [oracle.bos_id(), *ids, oracle.eos_id()]
    assert tokenizer.special_tokens == {"<unk>", "<s>", "</s>", "<|end|>"}
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": num_pieces + 7}))
    with pytest.raises(ModelError, match="token '<pad>' should have id"):
        read_tokenizer(tmp_path)


def test_tokenizer_json_comes_first(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"is not read")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert read_tokenizer(tmp_path) == "{}"


def test_damaged_model_is_named(tmp_path: Path) -> None:
    train(tmp_path, **SETTINGS["bpe"])
    (tmp_path / "tokenizer.model").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match=r"tokenizer\.model: cannot be converted"):
        read_tokenizer(tmp_path)


def test_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").touch()

    def find(library: str) -> ModuleSpec | None:
        if library == "google.protobuf":
            raise ModuleNotFoundError(library)
        return None if library == "sentencepiece" else ModuleSpec(library, None)

    monkeypatch.setattr("baton.tokenizer_file.find_spec", find)
    with pytest.raises(ModelError, match=r"sentencepiece, google\.protobuf .*'\.\[sentencepiece\]'"):
        read_tokenizer(tmp_path)


def test_directory_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path) and read_tokenizer(tmp_path) is None


def test_vocabulary_size_comes_from_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 77, "hidden_size": 8}')
    assert read_vocab_size(tmp_path) == 77


def test_directory_without_a_config_has_no_vocabulary_size(tmp_path: Path) -> None:
    assert read_vocab_size(tmp_path) is None


def test_files_are_bounded_and_must_be_utf8(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ModelError, match="latin: cannot be read"):
        read_text(tmp_path / "latin")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ModelError, match="huge: should be at most"):
        read_text(tmp_path / "huge")
    assert read_text(tmp_path / "absent") is None
