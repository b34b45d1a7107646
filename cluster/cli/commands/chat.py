"""Talk to a cluster: each line is sent with the conversation so far, and the answer is printed as it comes.

With MESSAGE the command prints the answer to that message and ends. An empty line or Ctrl-D ends a
conversation. Where the API needs a key, set BATON_API_KEY or OPENAI_API_KEY.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from baton.cluster.cli import output
from baton.cluster.cli.connections import HttpClient, add_url_options, decoded, url_of
from baton.cluster.cli.options import CliCommand, Parser
from baton.errors import ConfigError, WorkerLost

Message: TypeAlias = dict[str, str]
PROMPT: Final = "> "
DONE: Final = b"[DONE]"


class ListedModel(msgspec.Struct, frozen=True):
    """A model of `/v1/models`."""

    id: str


class Models(msgspec.Struct, frozen=True):
    """The answer of `/v1/models`."""

    data: list[ListedModel]


def _add_options(parser: Parser) -> None:
    parser.add_argument("message", metavar="MESSAGE", nargs="?", help="one message to send")
    add_url_options(parser)
    parser.add_argument("--model", metavar="NAME", help="model of the API (default: its first)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="tokens of an answer at most (default: 512)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0: the likeliest tokens (default: 0.7)"
    )


def _run(arguments: argparse.Namespace) -> None:
    output.check()
    client = HttpClient(url_of(arguments))
    settings = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    model = arguments.model or first_model(client)
    conversation: list[Message] = []
    if arguments.system:
        conversation.append({"role": "system", "content": arguments.system})
    for question in [arguments.message] if arguments.message else _typed():
        conversation.append({"role": "user", "content": question})
        answer = ""
        for text in stream_answer(client, model, conversation, settings):
            output.write(text)
            answer += text
        output.write("\n")
        conversation.append({"role": "assistant", "content": answer})


def _typed() -> Iterator[str]:
    if sys.stdin is None:
        raise ConfigError("MESSAGE: expected one, as there is nothing to read one from")
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            output.write(PROMPT)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def first_model(client: HttpClient) -> str:
    """Return the id of the first model of the API. Raises WorkerLost."""
    models = client.read_json("/v1/models", Models).data
    if not models:
        raise WorkerLost("the API has no model")
    return models[0].id


def stream_answer(
    client: HttpClient, model: str, messages: Sequence[Message], settings: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the answer in pieces as they come. Raises InvalidRequest or WorkerLost with the API's message."""
    body = {"model": model, "messages": list(messages), "stream": True, **settings}
    for _, data in client.events("POST", "/v1/chat/completions", json.dumps(body).encode()):
        if data == DONE:
            return
        chunk = decoded(data, dict[str, Any])
        if "error" in chunk:
            raise WorkerLost(chunk["error"]["message"])
        for choice in chunk.get("choices", ()):
            yield choice["delta"].get("content") or ""
    raise WorkerLost("the connection ended before the answer was complete")


chat = CliCommand(__doc__, _add_options, _run)
