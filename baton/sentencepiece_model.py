"""Converts a SentencePiece model to a tokenizer of the `tokenizers` library that gives the same tokens.

Byte fallback, the space before a text, normalisation and merges are those of the model. A token that is
added to the vocabulary cuts the text, and the parts begin with a space each, as in the tokenizers that the
makers of Llama 2 and Mistral published.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors

_SPACE: Final = "\u2581"  # in place of a space
_UNIGRAM: Final = 1  # of ModelType
_BPE: Final = 2
_CONTROL: Final = 3  # of Type
_USER_DEFINED: Final = 4
_TOKEN_KEYS: Final = ("special", "normalized", "lstrip", "rstrip", "single_word")


def convert(content: bytes, config: Mapping[str, Any], added: Mapping[str, int]) -> str:
    """Return the tokenizer of a SentencePiece model as JSON.

    content: of tokenizer.model. config: of tokenizer_config.json. added: token -> id, of added_tokens.json.
    Raises the errors of the libraries for a damaged file, and ValueError for a model of another kind.
    """
    proto = ModelProto()
    proto.ParseFromString(content)
    tokenizer = tokenizers.Tokenizer(_model(proto))
    _set_text(tokenizer, proto)
    _add_tokens(tokenizer, proto, config, added)
    _add_ends(tokenizer, proto, config)
    return tokenizer.to_str()


def _model(proto: ModelProto) -> models.Model:
    trainer = proto.trainer_spec
    if trainer.model_type == _UNIGRAM:
        pieces = [(piece.piece, piece.score) for piece in proto.pieces]
        return models.Unigram(pieces, trainer.unk_id, trainer.byte_fallback)
    if trainer.model_type == _BPE:
        ids = {piece.piece: number for number, piece in enumerate(proto.pieces)}
        return models.BPE(
            ids,
            list(_merges(proto, ids)),
            unk_token=trainer.unk_piece,
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
        )
    raise ValueError(f"models of type {trainer.model_type} are not supported, only BPE and unigram are")


def _set_text(tokenizer: tokenizers.Tokenizer, proto: ModelProto) -> None:
    """Set how text is changed before it is cut, and how pieces become text again."""
    spec = proto.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    parts: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)


def _merges(proto: ModelProto, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """The merges of a BPE model, in the order of the scores of what they make."""
    for piece in sorted(proto.pieces, key=lambda piece: -piece.score):
        text = piece.piece
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [(left, right) for left, right in pairs if left in ids and right in ids]
        yield from sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _add_tokens(
    tokenizer: tokenizers.Tokenizer,
    proto: ModelProto,
    config: Mapping[str, Any],
    added: Mapping[str, int],
) -> None:
    """Add the tokens that text never spells, in the order of their ids."""
    unknown = proto.trainer_spec.unk_id
    found = {
        number: AddedToken(piece.piece, normalized=False, special=piece.type == _CONTROL or number == unknown)
        for number, piece in enumerate(proto.pieces)
        if piece.type in (_CONTROL, _USER_DEFINED) or number == unknown
    }
    for content, number in added.items():
        found[number] = AddedToken(content, normalized=False)
    for number, token in config.get("added_tokens_decoder", {}).items():
        keys = {name: bool(token.get(name)) for name in _TOKEN_KEYS}
        found[int(number)] = AddedToken(token["content"], **keys)
    tokenizer.add_tokens([found[number] for number in sorted(found)])
    for number, token in found.items():
        if tokenizer.token_to_id(token.content) != number:
            raise ValueError(f"token {token.content!r} should have id {number}")


def _add_ends(tokenizer: tokenizers.Tokenizer, proto: ModelProto, config: Mapping[str, Any]) -> None:
    """Have a text begin and end with the tokens that the config asks for; Llama's begin with one."""
    trainer = proto.trainer_spec
    start = proto.pieces[trainer.bos_id].piece if trainer.bos_id >= 0 else None
    end = proto.pieces[trainer.eos_id].piece if trainer.eos_id >= 0 else None
    first = [start] if start is not None and config.get("add_bos_token", True) else []
    last = [end] if end is not None and config.get("add_eos_token", False) else []
    ids = {token: tokenizer.token_to_id(token) for token in (*first, *last)}
    if ids:
        single = [*first, "$A", *last]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=list(ids.items())
        )
