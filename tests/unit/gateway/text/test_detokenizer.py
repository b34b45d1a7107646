from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.text.detokenizer import MAX_PENDING, WindowDetokenizer
from baton.gateway.text.model_files import TokenizerConfig
from baton.gateway.text.tokenizer import Tokenizer
from tests.unit.gateway import tiny_tokenizers

BYTE_LEVEL = Tokenizer(tiny_tokenizers.byte_level(), TokenizerConfig())
BYTE_FALLBACK = Tokenizer(tiny_tokenizers.byte_fallback(), TokenizerConfig())
BYTE_LEVEL_IDS = tiny_tokenizers.byte_level().get_vocab()
BYTE_FALLBACK_IDS = tiny_tokenizers.byte_fallback().get_vocab()
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])


def stream(tokenizer: Tokenizer, token_ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    detokenizer = tokenizer.detokenizer(context)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


@BOTH
@given(text=st.text())
def test_parts_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    parts = stream(tokenizer, tokenizer.encode(text))
    assert "".join(parts) == text


@BOTH
@given(text=st.text(st.sampled_from("é日😀👨‍👩 a")))
def test_no_part_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    assert not any("\ufffd" in part for part in stream(tokenizer, tokenizer.encode(text)))


@BOTH
@pytest.mark.parametrize("text", tiny_tokenizers.TEXT)
def test_text_comes_as_soon_as_it_is_whole(tokenizer: Tokenizer, text: str) -> None:
    parts = stream(tokenizer, tokenizer.encode(text))
    assert parts[-1] == ""  # nothing was left for the end
    assert all(parts[1:-1]) or not text.isascii()  # the first may be the space that is not shown


@BOTH
@given(token_ids=st.lists(st.integers(0, 300), max_size=40))
def test_any_ids_at_all_can_be_streamed(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    assert isinstance("".join(stream(tokenizer, token_ids)), str)


@given(token_ids=st.lists(st.integers(0, 300), max_size=40))
def test_broken_bytes_come_out_as_the_tokenizer_shows_them(token_ids: list[int]) -> None:
    assert "".join(stream(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids)


def test_a_stream_of_broken_bytes_is_not_held_for_ever() -> None:
    first_byte = BYTE_LEVEL_IDS["æ"]  # how byte-level vocabularies write 0xE6, the first of three
    assert BYTE_LEVEL.decode([first_byte]) == "\ufffd"
    parts = stream(BYTE_LEVEL, [first_byte] * (2 * MAX_PENDING))
    assert "".join(parts) == "\ufffd" * (2 * MAX_PENDING)
    assert max(len(part) for part in parts) <= MAX_PENDING


def test_a_character_cut_off_by_the_end_is_shown_as_broken() -> None:
    token_ids = BYTE_LEVEL.encode("ab漢")
    assert "".join(stream(BYTE_LEVEL, token_ids[:-1])) == "ab\ufffd"


def test_the_context_is_not_repeated_and_keeps_the_space() -> None:
    prompt, answer = BYTE_FALLBACK.encode("the dog"), BYTE_FALLBACK.encode("and again")
    assert "".join(stream(BYTE_FALLBACK, answer, prompt[-4:])) == " and again"
    assert "".join(stream(BYTE_FALLBACK, answer)) == "and again"


def test_the_window_stays_short() -> None:
    seen: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        seen.append(len(token_ids))
        return BYTE_LEVEL.decode(token_ids)

    detokenizer = WindowDetokenizer(decode)
    for token_id in BYTE_LEVEL.encode("日本語 the quick brown fox 😀 " * 50):
        detokenizer.push(token_id)
    assert max(seen) < 12
