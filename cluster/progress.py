"""How far loading and generating are, as bars."""

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import NoReturn, Self, TextIO

from tqdm import tqdm

from baton.cluster.completion import TextDelta


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
