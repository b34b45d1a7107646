from baton.gateway.text.detokenizer import TextStream
from baton.gateway.text.tokenizer import Tokenizer, TokenizerConfig
from tests.unit.gateway import tiny_tokenizers

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level(), TokenizerConfig())


def parts(text: str, *stops: str, min_tokens: int = 0) -> tuple[list[str], str | None]:
    stream = TextStream(TOKENIZER.detokenizer(), stops, min_tokens=min_tokens)
    shown = [stream.push(token_id) for token_id in TOKENIZER.encode(text)]
    return [*shown, stream.finish()], stream.stopped_at


def test_without_stop_strings_all_text_comes() -> None:
    shown, stopped_at = parts("the quick brown fox 日本 😀")
    assert "".join(shown) == "the quick brown fox 日本 😀"
    assert stopped_at is None


def test_a_stop_string_of_several_byte_characters_is_found() -> None:
    shown, stopped_at = parts("日本語のテキスト😀 and more", "ト😀")
    assert "".join(shown) == "日本語のテキス"
    assert stopped_at == "ト😀"


def test_the_first_min_tokens_are_not_searched() -> None:
    num_tokens = len(TOKENIZER.encode("the fox,"))
    shown, stopped_at = parts("the fox, again, again", ",", min_tokens=num_tokens)
    assert "".join(shown) == "the fox, again"
    assert stopped_at == ","


def test_half_a_character_at_the_end_may_complete_a_stop_string() -> None:
    stream = TextStream(TOKENIZER.detokenizer(), ["b\ufffd"])
    shown = [stream.push(token_id) for token_id in TOKENIZER.encode("ab漢")[:-1]]
    assert "".join([*shown, stream.finish()]) == "a"
    assert stream.stopped_at == "b\ufffd"
