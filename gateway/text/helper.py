"""A process that reads large bodies for a gateway.

    python -m baton.gateway.text.helper DIRECTORY [TEMPLATE]

1. The gateway writes a frame to its standard input: the length, then a Job.
2. The helper reads the body, and writes a frame to its standard output: a Done, or a Failed.
3. At the end of its input, which is also the end of the gateway, it ends.

It has nothing but the model's directory: no key, no socket, and a lower priority than what serves.
"""

import contextlib
import logging
import os
import signal
import sys
from array import array
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

import msgspec

from baton.errors import BatonError, InvalidRequest, ModelError
from baton.gateway.api.call import Prompt
from baton.gateway.api.errors import ApiError
from baton.gateway.api.prompt_reader import Kind, PromptReader, ReadCall, ReadTerms, TextAnswer
from baton.gateway.api.types import ChatBody, CompletionBody
from baton.gateway.text.chat_template import ChatTemplate
from baton.gateway.text.model_files import read_vocab_size
from baton.gateway.text.tokenizer import Tokenizer

LENGTH_BYTES: Final = 4
NICENESS: Final = 10
TOKEN_ID_TYPE: Final = "i"  # of array, four bytes

logger = logging.getLogger(__name__)


class TextJob(msgspec.Struct, frozen=True):
    kind: Kind
    request_policy: ReadTerms
    data: bytes


class TextDone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A ReadCall, or the TextAnswer in `answer`, in a form that is quick to take apart."""

    num_unknown: int
    answer: bytes | None = None
    chat: ChatBody | None = None
    completion: CompletionBody | None = None
    prompts: list[tuple[str | None, bytes]] = []  # text, for those who asked for its echo; token ids
    has_tools: bool = False


class TextFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The error; `status` 0 is a fault of the model's own files."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None


Result: TypeAlias = TextDone | TextFailed
JOBS: Final = msgspec.msgpack.Decoder(TextJob)
RESULTS: Final[msgspec.msgpack.Decoder[Result]] = msgspec.msgpack.Decoder(Result)


def frame(message: TextJob | Result) -> bytes:
    """As both sides write it."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def pack_token_ids(token_ids: tuple[int, ...]) -> bytes:
    return array(TOKEN_ID_TYPE, token_ids).tobytes()


def unpack_token_ids(data: bytes) -> tuple[int, ...]:
    token_ids = array(TOKEN_ID_TYPE)
    token_ids.frombytes(data)
    return tuple(token_ids)


def do(reader: PromptReader, job: TextJob) -> Result:
    """What `reader` makes of the job; whatever goes wrong is that one job's."""
    try:
        read = reader.read(job.kind, job.data, job.request_policy)
    except ApiError as error:
        return TextFailed(
            status=error.status,
            message=str(error),
            code=error.code,
            param=error.param,
            retry_after_s=error.retry_after_s,
        )
    except InvalidRequest as error:
        return TextFailed(status=400, message=_encodable(str(error)), code="invalid_value")
    except ModelError as error:
        return TextFailed(status=0, message=_encodable(str(error)))
    except (RecursionError, MemoryError) as error:
        return TextFailed(status=400, message=f"the body is too much to be read: {type(error).__name__}")
    if isinstance(read, TextAnswer):
        return TextDone(num_unknown=read.num_unknown, answer=read.body)
    return _packed(read)


def raise_failed(failed: TextFailed) -> None:
    """Raise the error on the gateway's side."""
    if not failed.status:
        raise ModelError(failed.message)
    raise ApiError(
        failed.status,
        failed.message,
        code=failed.code,
        param=failed.param,
        retry_after_s=failed.retry_after_s,
    )


def unpacked_prompt(text: str | None, token_ids: bytes) -> Prompt:
    return Prompt(text, unpack_token_ids(token_ids))


def _packed(read: ReadCall) -> TextDone:
    body = read.body
    has_echo = isinstance(body, CompletionBody) and bool(body.echo)
    return TextDone(
        num_unknown=read.num_unknown,
        chat=body if isinstance(body, ChatBody) else None,
        completion=body if isinstance(body, CompletionBody) else None,
        prompts=[(each.text if has_echo else None, pack_token_ids(each.token_ids)) for each in read.prompts],
        has_tools=read.has_tools,
    )


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def main(directory: Path, template: str | None, jobs: BinaryIO, results: BinaryIO) -> None:
    """Serve until `jobs` ends."""
    reader = PromptReader(
        Tokenizer.find(directory),
        ChatTemplate.from_directory(directory, template),
        read_vocab_size(directory),
    )
    while len(head := jobs.read(LENGTH_BYTES)) == LENGTH_BYTES:
        job = JOBS.decode(jobs.read(int.from_bytes(head, "big")))
        try:
            result = do(reader, job)
        except Exception:  # a bug of ours: the gateway says 500, and this process goes on
            logger.exception("a body could not be read")
            result = TextFailed(
                status=500, message="an internal error ended this request", code="internal_error"
            )
        del job
        results.write(frame(result))
        results.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the gateway ends this
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    try:
        main(
            Path(sys.argv[1]),
            sys.argv[2] if len(sys.argv) > 2 else None,
            sys.stdin.buffer,
            sys.stdout.buffer,
        )
    except (BrokenPipeError, BatonError) as error:
        sys.exit(f"text helper: {error}")
