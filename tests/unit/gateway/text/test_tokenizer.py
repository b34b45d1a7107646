import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from baton.cluster.model_directory import resolve_model
from baton.errors import InvalidRequest, ModelError
from baton.gateway.text.tokenizer import (
    MAX_PENDING,
    ChoiceText,
    StopStrings,
    Tokenizer,
    WindowDetokenizer,
)
from baton.request import FinishReason, SamplingParams
from tests.unit.gateway import tiny_tokenizers

BYTE_LEVEL = Tokenizer(tiny_tokenizers.byte_level())
BYTE_FALLBACK = Tokenizer(tiny_tokenizers.byte_fallback())
TINY = Tokenizer.from_directory(resolve_model("tiny"))
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


# Whole texts.


@given(text=st.text())
def test_decoding_undoes_encoding(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text


def test_directory_of_transformers_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizers.byte_level(), eos_token="</s>", bos_token="<s>"
    )
    oracle.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    text = "the café 😀</s>"
    assert tokenizer.encode(text) == oracle.encode(text)
    assert tokenizer.vocab_size == len(oracle)


@pytest.mark.parametrize(
    ("change", "adds_bos"),
    [
        ({}, True),
        ({"bos_token": {"content": "<s>"}, "tokenizer_class": "GemmaTokenizer"}, True),
        ({"add_bos_token": False}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, False),
        ({"bos_token": "<unknown>"}, False),
    ],
)
def test_bos_token_that_the_config_asks_for_is_added(
    change: dict[str, Any], adds_bos: bool, directory: Path
) -> None:
    """The files of DeepSeek V3, R1 and its distilled models: tokenizer.json alone adds no BOS token."""
    config = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | change))
    tokenizer = Tokenizer.from_directory(directory)
    plain = BYTE_LEVEL.encode("the café")
    bos = BYTE_LEVEL.added_tokens["<s>"]
    assert tokenizer.encode("the café") == ([bos, *plain] if adds_bos else plain)
    assert tokenizer.encode("the café", add_special_tokens=False) == plain


def test_bos_token_of_the_file_is_not_added_twice(directory: Path) -> None:
    inner = tiny_tokenizers.byte_fallback()
    ids = {token: number for token in ("<s>", "</s>") if (number := inner.token_to_id(token)) is not None}
    inner.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A", "</s>"], special_tokens=list(ids.items())
    )
    inner.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    expected = [ids["<s>"], *BYTE_FALLBACK.encode("the"), ids["</s>"]]
    assert Tokenizer.from_directory(directory).encode("the") == expected


def test_special_tokens_are_skipped_unless_asked_for(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    token_ids = tokenizer.encode("a</s>")
    assert tokenizer.decode(token_ids) == "a"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "a</s>"


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    inner = tiny_tokenizers.byte_level()
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    tokenizer = Tokenizer(inner)
    text = "a long enough text"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_ids_of_a_padded_vocabulary_have_no_text() -> None:
    assert BYTE_LEVEL.decode([BYTE_LEVEL.vocab_size + 5]) == ""


def test_half_a_surrogate_pair_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        BYTE_LEVEL.encode("a\ud83d")


DAMAGED_PARTS = {
    "damaged when read": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "panic": {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    "error": {"model": {"type": "WordLevel", "unk_token": "x", "vocab": {}}},
}


@pytest.mark.parametrize("part", DAMAGED_PARTS)
def test_tokenizer_that_fails_inside_is_a_model_error(directory: Path, part: str) -> None:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | DAMAGED_PARTS[part]))
    with pytest.raises(ModelError, match="is not a tokenizer: |fails to encode: "):
        Tokenizer.from_directory(directory).encode("hello world")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "tokenizer.json: is not a tokenizer"),
        (b"\xff\xfe", "tokenizer.json: cannot be read"),
        (None, "tokenizer.json: there is no such file"),
    ],
)
def test_missing_or_damaged_file_is_named(directory: Path, content: bytes | None, message: str) -> None:
    (directory / "tokenizer.json").unlink()
    if content is not None:
        (directory / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_directory(directory)


# Streams.


def stream(
    tokenizer: Tokenizer, token_ids: Sequence[int], context: Sequence[int] = (), *, skip: bool = True
) -> list[str]:
    detokenizer = tokenizer.detokenizer(context, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


@BOTH
@given(text=st.text(st.one_of(st.characters(), st.sampled_from("é日😀👨‍👩 a"))))
def test_parts_join_to_the_text_and_never_show_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    parts = stream(tokenizer, tokenizer.encode(text))
    assert "".join(parts) == text
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@BOTH
@pytest.mark.parametrize("text", tiny_tokenizers.TEXT)
def test_text_comes_as_soon_as_its_characters_are_whole(tokenizer: Tokenizer, text: str) -> None:
    parts = stream(tokenizer, tokenizer.encode(text))
    assert parts[-1] == ""  # nothing was left for the end
    assert all(parts[1:-1]) or not text.isascii()  # the first may be the space that is not shown


@BOTH
@given(token_ids=st.lists(st.integers(0, 300), max_size=40))
def test_any_token_ids_can_be_streamed(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    assert isinstance("".join(stream(tokenizer, token_ids)), str)


@given(st.lists(st.integers(0, TINY.vocab_size + 3), max_size=40), st.booleans())
def test_byte_level_stream_equals_the_text_that_the_library_decodes_at_once(
    token_ids: list[int], skip: bool
) -> None:
    """The tiny vocabulary has every byte and added tokens, so broken UTF-8 comes up."""
    assert "".join(stream(TINY, token_ids, skip=skip)) == TINY.decode(token_ids, skip_special_tokens=skip)


def test_stream_of_broken_bytes_is_not_held_for_ever() -> None:
    first_byte = tiny_tokenizers.byte_level().get_vocab()["æ"]  # 0xE6, the first of three bytes
    assert BYTE_LEVEL.decode([first_byte]) == "\ufffd"
    parts = stream(BYTE_LEVEL, [first_byte] * (2 * MAX_PENDING))
    assert "".join(parts) == "\ufffd" * (2 * MAX_PENDING)
    assert max(len(part) for part in parts) <= MAX_PENDING


def test_context_is_not_repeated_and_keeps_the_space() -> None:
    prompt, answer = BYTE_FALLBACK.encode("the dog"), BYTE_FALLBACK.encode("and again")
    assert "".join(stream(BYTE_FALLBACK, answer, prompt[-4:])) == " and again"
    assert "".join(stream(BYTE_FALLBACK, answer)) == "and again"


def test_window_of_the_detokenizer_stays_short() -> None:
    seen: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        seen.append(len(token_ids))
        return BYTE_LEVEL.decode(token_ids)

    detokenizer = WindowDetokenizer(decode)
    for token_id in BYTE_LEVEL.encode("日本語 the quick brown fox 😀 " * 50):
        detokenizer.push(token_id)
    assert max(seen) < 12


# Stop strings.

TEXTS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def text_before_the_first_stop_string(text: str, stops: Sequence[str]) -> str:
    """The oracle: the text as it is when the first stop string becomes whole, without that stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 30)))
def test_text_is_cut_before_the_first_stop_string_whatever_the_parts(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    strings = StopStrings(stops)
    shown = "".join([strings.push(text[start:end]) for start, end in pairwise(edges)]) + strings.finish()
    assert shown == text_before_the_first_stop_string(text, stops)
    assert (strings.matched is not None) == any(stop in text for stop in stops)


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 30)))
def test_stop_string_is_given_out_when_it_is_included(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    strings = StopStrings(stops, includes_stop=True)
    shown = "".join([strings.push(text[start:end]) for start, end in pairwise(edges)]) + strings.finish()
    assert shown == text_before_the_first_stop_string(text, stops) + (strings.matched or "")


@given(text=TEXTS, stops=STOPS)
def test_only_the_beginning_of_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    strings = StopStrings(stops)
    text_so_far = given_out = ""
    for character in text:
        given_out += strings.push(character)
        text_so_far += character
        if strings.matched is not None:
            return
        held = text_so_far[len(given_out) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def shown(
    text: str, *stops: str, num_cut: int = 0, end: FinishReason = FinishReason.LENGTH, **sampling: Any
) -> tuple[str, FinishReason | None, str | int | None]:
    """The text of a choice that generates `text`, less its last `num_cut` tokens, and how it ends."""
    choice = ChoiceText(BYTE_LEVEL.detokenizer(), SamplingParams(**sampling, stop=stops, max_tokens=1000))
    token_ids = BYTE_LEVEL.encode(text)
    parts = list[str]()
    for index, token_id in enumerate(token_ids[: len(token_ids) - num_cut]):
        is_last = index == len(token_ids) - 1
        parts.append(choice.accept(token_id, end if is_last else None))
        if choice.finish_reason is not None:
            break
    else:
        parts.append(choice.accept(None, end))
    return "".join(parts), choice.finish_reason, choice.stop_reason


COMMA = BYTE_LEVEL.encode(",")[0]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(shown("the fox"), ("the fox", "length", None), id="whole"),
        pytest.param(shown("the fox", num_cut=1), ("the f", "length", None), id="an end without a token"),
        pytest.param(shown("ab漢", num_cut=1), ("ab\ufffd", "length", None), id="half a character"),
        pytest.param(
            shown("fox,", end=FinishReason.STOP, stop_token_ids=(COMMA,)),
            ("fox", "stop", COMMA),
            id="the token that stops is not shown",
        ),
        pytest.param(shown("the quick fox", "ck f"), ("the qui", "stop", "ck f"), id="before the engine"),
        pytest.param(shown("the fox", "x"), ("the fo", "stop", "x"), id="with the last token"),
        pytest.param(
            shown("a fox,", "ox,,", end=FinishReason.STOP), ("a fox", "stop", None), id="the beginning of one"
        ),
        pytest.param(shown("日本語😀 and more", "語😀"), ("日本", "stop", "語😀"), id="of several bytes"),
        pytest.param(
            shown("ab漢", "b\ufffd", num_cut=1), ("a", "stop", "b\ufffd"), id="completed by half a character"
        ),
        pytest.param(
            shown("the fox, again, again", ",", min_tokens=len(BYTE_LEVEL.encode("the fox,"))),
            ("the fox, again", "stop", ","),
            id="not in the first min_tokens",
        ),
    ],
)
def test_choice_ends_with_its_text_and_reason(found: Any, expected: Any) -> None:
    assert found == expected


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        shown("a", "")
