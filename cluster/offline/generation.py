"""One prompt being answered: the engine's tokens become text, choice by choice.

1. `accept` takes every StepOutput of the request and says what it adds to the text.
2. A choice ends by the engine's word or by a stop string, which the engine cannot know: tokens that still
   come for it are dropped.
3. When `is_finished`, the request is of no more use to the engine, and `completion` has the whole answer.
"""

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import NoReturn, Self, TextIO

from tqdm import tqdm

from baton.cluster.cli.client import Completion, CompletionOutput, TextDelta
from baton.errors import InvalidRequest
from baton.gateway.text.detokenizer import ChoiceText
from baton.gateway.text.tokenizer import Tokenizer, detokenizer_of
from baton.request import FinishReason, Request, StepOutput, TokenLogprobs


class Generation:
    def __init__(
        self,
        request: Request,
        prompt: str | None,
        prompt_index: int,
        *,
        tokenizer: Tokenizer | None,
        stops: Sequence[str],
    ) -> None:
        """Without a tokenizer all text is "". Raises InvalidRequest on stop strings that cannot be found."""
        if tokenizer is None and stops:
            raise InvalidRequest("stop: the model has no tokenizer, so its text cannot be searched")
        self.request = request
        self._prompt = prompt
        self._prompt_index = prompt_index
        self._choices = [_Choice(request, tokenizer, stops) for _ in range(request.sampling.n)]
        self._num_cached_tokens = 0
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self._choices)

    def accept(self, output: StepOutput) -> TextDelta | None:
        """What the output adds; None for a choice that has ended at a stop string."""
        choice = self._choices[output.choice]
        if choice.finish_reason is not None:
            return None
        if output.choice == 0 and output.index == 0:
            self._num_cached_tokens = output.num_cached_tokens
            self._prompt_logprobs = output.prompt_logprobs
        text = choice.accept(output)
        return TextDelta(
            prompt_index=self._prompt_index,
            index=output.choice,
            text=text,
            token_ids=() if output.token_id is None else (output.token_id,),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            logprobs=None if output.logprobs is None else (output.logprobs,),
        )

    def completion(self) -> Completion:
        return Completion(
            prompt=self._prompt,
            prompt_token_ids=self.request.token_ids,
            outputs=tuple(choice.completion_output(index) for index, choice in enumerate(self._choices)),
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )


class _Choice:
    def __init__(self, request: Request, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        sampling = request.sampling
        self._text = ChoiceText(detokenizer_of(tokenizer, request.token_ids), stops, sampling)
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] | None = None if sampling.logprobs is None else []
        self.token_ids: list[int] = []

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._text.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self._text.stop_reason

    def accept(self, output: StepOutput) -> str:
        """Take the next token, if there is one; returns the text that has become certain."""
        if output.token_id is not None:
            self.token_ids.append(output.token_id)
        if output.logprobs is not None and self._logprobs is not None:
            self._logprobs.append(output.logprobs)
        text = self._text.accept(output.token_id, output.finish_reason)
        self._texts.append(text)
        return text

    def completion_output(self, index: int) -> CompletionOutput:
        assert self.finish_reason is not None, f"choice {index} is not finished"
        return CompletionOutput(
            index=index,
            text="".join(self._texts),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )


# How far loading and generating are, as bars.


class LoadProgress:
    """A bar in MB/s on `stream` while weights are read; call it with (bytes so far, bytes in all)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: tqdm[NoReturn] | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=total_bytes, desc="Loading weights", unit="B", unit_scale=True, file=self._stream
            )
        self._bar.update(done_bytes - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def watch(deltas: Iterable[TextDelta], num_choices: int) -> Iterator[TextDelta]:
    """The same deltas, with a bar of finished choices and tokens a second on stderr."""
    num_tokens = 0
    with tqdm(total=num_choices, desc="Generating", unit="choice") as bar:
        for delta in deltas:
            num_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                elapsed_s = bar.format_dict["elapsed"]
                bar.set_postfix_str(f"{num_tokens / max(elapsed_s, 1e-9):,.0f} tokens/s", refresh=False)
                bar.update()
            yield delta
