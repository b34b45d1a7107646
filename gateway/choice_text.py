"""The text of one choice, token by token, and why it ended."""

from collections.abc import Sequence

from baton.gateway.text_stream import Incremental, TextStream
from baton.request import FinishReason, SamplingParams


class ChoiceText:
    """`accept` every token until `finish_reason` is set: by the engine's word, or by a stop string."""

    def __init__(self, detokenizer: Incremental, stops: Sequence[str], sampling: SamplingParams) -> None:
        """Raises InvalidRequest on stop strings that cannot be found."""
        self._stream: TextStream | None = None
        self._text: Incremental = detokenizer
        if stops:
            self._text = self._stream = TextStream(detokenizer, stops, min_tokens=sampling.min_tokens)
        self._stop_token_ids = sampling.stop_token_ids
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None  # the stop string, or the one of `stop_token_ids`

    def accept(self, token_id: int | None, reason: FinishReason | None) -> str:
        """The text that has become certain. None: the end came without a token."""
        text = ""
        if token_id is not None and reason is not FinishReason.STOP:  # what stops is not shown
            text = self._text.push(token_id)
        if reason is not None:
            text += self._text.finish()
            self.finish_reason = reason
        if self._stream is not None and self._stream.stopped_at is not None:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = self._stream.stopped_at
        elif reason is FinishReason.STOP and token_id in self._stop_token_ids:
            self.stop_reason = token_id
        return text
