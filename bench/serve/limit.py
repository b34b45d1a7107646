"""A server that does the least possible: the rate of a bare socket without any serving.

    python -m baton.bench.serve.limit

Every POST is answered with one completion, or, if its body asks for a stream, with as many events as tokens,
each written by itself. The server prints its port, and ends when its stdin does.
"""

import asyncio
import json
import os
import re
import threading
from typing import Final, cast

import httptools
import uvloop

_NUM_TOKENS: Final = re.compile(rb'"max_tokens": ?(\d+)')
_STREAM: Final = re.compile(rb'"stream": ?true')


def _choice(text: str, reason: str | None) -> dict[str, object]:
    return {
        "id": "cmpl-0123456789abcdef",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "limit",
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}],
    }


def _event(content: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


TOKEN: Final = _event(_choice(" word", None))
LAST: Final = _event(_choice(" word", "length"))


def _usage(num_tokens: int) -> dict[str, object]:
    return {"usage": {"prompt_tokens": 32, "completion_tokens": num_tokens, "total_tokens": 32 + num_tokens}}


def _tail(num_tokens: int) -> bytes:
    return _event({**_choice("", None), "choices": [], **_usage(num_tokens)}) + b"data: [DONE]\n\n"


def _whole(num_tokens: int) -> bytes:
    return json.dumps(_choice(" word" * num_tokens, "length") | _usage(num_tokens)).encode()


def _wishes(body: bytes) -> tuple[int, bool]:
    found = _NUM_TOKENS.search(body)
    return int(found[1]) if found else 1, _STREAM.search(body) is not None


class Bare(asyncio.Protocol):
    """A socket, a parser of requests, and nothing else."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._body = cast(asyncio.Transport, transport), b""
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        num_tokens, is_stream = _wishes(self._body)
        self._body, self._parser = b"", httptools.HttpRequestParser(self)
        if not is_stream:
            whole = _whole(num_tokens)
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            self._transport.write(head % len(whole) + whole)
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(head)
        self._stream(num_tokens, num_tokens)

    def _stream(self, num_left: int, num_tokens: int) -> None:
        if self._transport.is_closing():
            return
        if num_left == 0:
            self._chunk(_tail(num_tokens))
            self._transport.write(b"0\r\n\r\n")
            return
        self._chunk(TOKEN if num_left > 1 else LAST)
        asyncio.get_running_loop().call_soon(self._stream, num_left - 1, num_tokens)

    def _chunk(self, event: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _die_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_die_with_parent, daemon=True).start()
    uvloop.run(_serve())
