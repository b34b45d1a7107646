from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.model_directory import resolve_model
from baton.gateway.text.detokenizer import BYTE_OF_CHARACTER, ByteLevelDetokenizer, BytesOfTokens, token_bytes
from baton.gateway.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(resolve_model("tiny"))
token_ids = st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=40)


def text_of(detokenizer: ByteLevelDetokenizer, ids: list[int]) -> str:
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])


def byte_level(*, skip_special_tokens: bool) -> ByteLevelDetokenizer:
    detokenizer = TOKENIZER.detokenizer(skip_special_tokens=skip_special_tokens)
    assert isinstance(detokenizer, ByteLevelDetokenizer)
    return detokenizer


@given(token_ids, st.booleans())
def test_a_stream_is_what_the_library_decodes_at_once(ids: list[int], skip: bool) -> None:
    """The oracle sees all ids together; the tiny vocabulary has every byte, so broken UTF-8 comes up."""
    assert text_of(byte_level(skip_special_tokens=skip), ids) == TOKENIZER.decode(
        ids, skip_special_tokens=skip
    )


def test_the_alphabet_has_every_byte_once() -> None:
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))


def test_an_added_token_is_its_own_text() -> None:
    assert token_bytes("<|a b|>") == b"<|a b|>"
    assert token_bytes("\u0120the") == b" the"


def test_tokens_are_looked_up_once() -> None:
    asked: list[int] = []

    def token_of_id(token_id: int) -> str | None:
        asked.append(token_id)
        return {7: "a"}.get(token_id)

    table = BytesOfTokens(token_of_id, hidden={3})
    assert [table[token_id] for token_id in (7, 7, 8, 8, 3)] == [b"a", b"a", b"", b"", b""]
    assert asked == [7, 8]
