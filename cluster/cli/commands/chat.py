"""Talk to a cluster: each line is sent with the conversation so far, and the answer is printed as it comes.

With MESSAGE the command prints the answer to that message and ends. An empty line or Ctrl-D ends a
conversation. Where the API needs a key, set BATON_API_KEY or OPENAI_API_KEY.
"""

import argparse
import http.client
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from baton.cluster.cli import output
from baton.cluster.cli.options import CliCommand, Parser
from baton.cluster.cluster_record import find_record
from baton.config.environment import api_key
from baton.errors import ConfigError, InvalidRequest, WorkerLost

Message: TypeAlias = dict[str, str]
PROMPT: Final = "> "
TIMEOUT_S: Final = 600.0
DONE: Final = "[DONE]"


def _add_options(parser: Parser) -> None:
    parser.add_argument("message", metavar="MESSAGE", nargs="?", help="one message to send")
    parser.add_argument("--url", metavar="URL", help="URL of the API (default: the cluster on this machine)")
    parser.add_argument("--port", type=int, metavar="N", help="port of the API of a cluster on this machine")
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
    if arguments.url and arguments.port is not None:
        raise ConfigError("--port: --url has one already, leave one of them out")
    client = ApiClient(arguments.url or find_record(arguments.port).url, api_key())
    settings = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    model = arguments.model or client.first_model()
    conversation: list[Message] = []
    if arguments.system:
        conversation.append({"role": "system", "content": arguments.system})
    for question in [arguments.message] if arguments.message else _typed():
        conversation.append({"role": "user", "content": question})
        answer = ""
        for text in client.chat(model, conversation, settings):
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


class ApiClient:
    """As much of a client of the OpenAI API as `baton chat` needs."""

    def __init__(self, url: str, key: str | None) -> None:
        """url: with or without /v1. ConfigError: it is no HTTP URL."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url: expected one such as http://127.0.0.1:8000, got {url!r}")
        secure = parts.scheme == "https"
        self._kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def first_model(self) -> str:
        """Return the id of the first model of the API. Raises WorkerLost."""
        models = json.load(self._ask("GET", "/models"))["data"]
        if not models:
            raise WorkerLost("the API has no model")
        return str(models[0]["id"])

    def chat(self, model: str, messages: Sequence[Message], settings: Mapping[str, Any]) -> Iterator[str]:
        """Yield the answer in pieces as they come.

        Raises InvalidRequest or WorkerLost with the API's message.
        """
        body = {"model": model, "messages": list(messages), "stream": True, **settings}
        answer = self._ask("POST", "/chat/completions", json.dumps(body).encode())
        for line in answer:
            event = line.decode().strip().removeprefix("data:").strip()
            if event == DONE:
                return
            if not event or event.startswith(":"):
                continue
            chunk = json.loads(event)
            if "error" in chunk:
                raise WorkerLost(chunk["error"]["message"])
            for choice in chunk.get("choices", ()):
                yield choice["delta"].get("content") or ""
        raise WorkerLost("the answer ended before its end")

    def _ask(self, method: str, route: str, body: bytes | None = None) -> http.client.HTTPResponse:
        where = f"{self._host}:{self._port or ''}"
        connection = self._kind(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request(method, self._path + route, body, self._headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise WorkerLost(f"the API at {where} does not answer: {error}") from None
        if answer.status == 401:
            wrong = (
                "does not know the key" if "Authorization" in self._headers else "wants a key, none was given"
            )
            raise ConfigError(f"the API at {where} {wrong}: set BATON_API_KEY or OPENAI_API_KEY")
        if answer.status >= 400:
            kind = InvalidRequest if answer.status < 500 else WorkerLost
            raise kind(_message(answer.read(1 << 16)) or f"the API at {where} answers {answer.status}")
        return answer


def _message(body: bytes) -> str:
    """Return the message of an error in OpenAI's form; "" for another body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


chat = CliCommand(__doc__, _add_options, _run)
