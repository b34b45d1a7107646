"""The connections of commands to a running cluster, to its routers or to a gateway over HTTP.

The options that name the cluster are here, too. Requests over HTTP carry the caller's key.
"""

import argparse
import asyncio
import http.client
import json
from argparse import ArgumentTypeError
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from baton.cluster.cli.options import Parser
from baton.cluster.cluster_key import Keys, read_keys
from baton.cluster.cluster_record import find_record
from baton.cluster.operator_node import Operator, connected
from baton.config.environment import api_key, cluster_key_file
from baton.errors import ConfigError, InvalidRequest, PeerGone, WorkerLost, reason_of
from baton.messages.bounds import MAX_ROUTERS
from baton.messages.workers import Address, Routers

HTTP_TIMEOUT_S: Final = 600.0
MAX_ERROR_BYTES: Final = 1 << 16
BROKEN_OFF: Final = "has broken off its answer"
AnswerT = TypeVar("AnswerT")
ValueT = TypeVar("ValueT")


def add_router_options(parser: Parser) -> None:
    """Add --port, --router and --cluster-key-file, which name a cluster."""
    parser.add_argument("--port", type=int, metavar="N", help="port of the API of a cluster on this machine")
    parser.add_argument(
        "--router", type=addresses, metavar="HOST:PORT", help="router of another cluster; several with commas"
    )
    add_key_option(parser)


def add_key_option(parser: Parser) -> None:
    """Add --cluster-key-file."""
    parser.add_argument(
        "--cluster-key-file", metavar="FILE", help="the cluster's key (default: BATON_CLUSTER_KEY_FILE)"
    )


def ask(arguments: argparse.Namespace, question: Callable[[Operator], Awaitable[AnswerT]]) -> AnswerT:
    """Connect to the routers that the arguments name, and return the answer to `question`.

    Raises ConfigError when no cluster is found, and WorkerLost when no router answers.
    """
    routers, keys = routers_of(arguments)

    async def connect_and_ask() -> AnswerT:
        async with connected(routers, keys) as operator:
            return await question(operator)

    try:
        return asyncio.run(connect_and_ask())
    except (TimeoutError, PeerGone):
        raise no_answer(routers) from None


def no_answer(routers: Routers) -> WorkerLost:
    """Return the error of a command that none of these routers answers."""
    return WorkerLost(f"the router at {spelled(routers)} does not answer; is the key right?")


def has_no_key(file: str | None) -> bool:
    """Return whether neither the command line (`file`) nor the environment names a cluster's key."""
    return file is None and cluster_key_file() is None


def key_file(file: str | None) -> Path:
    """Return `file`, or the one that BATON_CLUSTER_KEY_FILE names. ConfigError: there is neither."""
    name = file or cluster_key_file()
    if name is None:
        raise ConfigError(
            "--cluster-key-file: expected the file with the cluster's key, got none: give the file that the "
            "cluster was started with; `baton cluster-key new` makes one for a new cluster"
        )
    return Path(name)


def addresses(text: str) -> Routers:
    """Read HOST:PORT, or several with commas between them."""
    found = tuple(map(_address, text.split(",")))
    if len(found) > MAX_ROUTERS:
        raise ArgumentTypeError(f"expected {MAX_ROUTERS} routers at most, got {len(found)}")
    return found


def spelled(routers: Routers) -> str:
    """Write addresses as `addresses` reads them."""
    return ", ".join(f"{router.host}:{router.port}" for router in routers)


def routers_of(arguments: argparse.Namespace) -> tuple[Routers, Keys]:
    """Return the routers that the arguments name, and their keys. ConfigError when no cluster is found."""
    if arguments.router is None:
        record = find_record(arguments.port)
        return record.routers, record.keys
    return arguments.router, read_keys(key_file(arguments.cluster_key_file))


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ArgumentTypeError(f"expected HOST:PORT such as 10.0.0.1:7000, got {text!r}")
    return Address(host.strip("[]"), int(port))


def add_url_options(parser: Parser) -> None:
    """Add --url and --port, which name a gateway."""
    parser.add_argument("--url", metavar="URL", help="URL of the API (default: the cluster on this machine)")
    parser.add_argument("--port", type=int, metavar="N", help="port of the API of a cluster on this machine")


def url_of(arguments: argparse.Namespace) -> str:
    """Return the URL that the options name. ConfigError: there is no cluster, or several."""
    if arguments.url and arguments.port is not None:
        raise ConfigError("--port: --url has one already, leave one of them out")
    return str(arguments.url or find_record(arguments.port).url)


class HttpClient:
    """A client of one gateway. The key comes from BATON_API_KEY or OPENAI_API_KEY."""

    def __init__(self, url: str, *, timeout_s: float = HTTP_TIMEOUT_S) -> None:
        """url: with or without /v1. timeout_s: of silence.

        ConfigError: it is no HTTP URL, or the key has characters that no key has.
        """
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            host, self._port = (parts.hostname or "").encode("idna").decode(), parts.port
        except ValueError:  # a port that is no port, a name that no machine can have
            host = ""
        if not host or parts.scheme not in ("http", "https"):
            raise ConfigError(f"--url: expected one such as http://127.0.0.1:8000, got {url!r}")
        secure = parts.scheme == "https"
        self._kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._host = host
        self._where = parts.netloc.rpartition("@")[2]
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        # The answer owns the socket: it ends with the last byte that is read, or with `close`.
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if key := api_key():
            if not (key.isascii() and key.isprintable()):
                raise ConfigError(
                    "BATON_API_KEY or OPENAI_API_KEY: expected printable ASCII characters alone, got others, "
                    "such as the end of a line"
                )
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(self, method: str, route: str, body: bytes | None = None) -> http.client.HTTPResponse:
        """Return the answer; its body is unread.

        Raises ConfigError for a wrong key, InvalidRequest and WorkerLost with the gateway's message.
        """
        with self._lost("does not answer"):
            connection = self._kind(self._host, self._port, timeout=self._timeout_s)
            connection.request(method, self._path + route, body, self._headers)
            answer = connection.getresponse()
            error = answer.read(MAX_ERROR_BYTES) if answer.status >= 400 else b""
        if answer.status == 401:
            wrong = (
                "does not know the key" if "Authorization" in self._headers else "wants a key, none was given"
            )
            raise ConfigError(f"the API at {self._where} {wrong}: set BATON_API_KEY or OPENAI_API_KEY")
        if answer.status >= 400:
            kind = InvalidRequest if answer.status < 500 else WorkerLost
            raise kind(_message(error) or f"the API at {self._where} answers {answer.status}")
        return answer

    def read(self, route: str, max_bytes: int | None = None) -> bytes:
        """Return the body of a GET, or its first `max_bytes`. Raises as `ask`."""
        with self.ask("GET", route) as answer, self._lost(BROKEN_OFF):
            return answer.read(max_bytes)

    def read_json(self, route: str, type_: type[ValueT]) -> ValueT:
        """Return the body of a GET. Raises as `ask`, and WorkerLost for a body that is not of the type."""
        return decoded(self.read(route), type_)

    def events(
        self, method: str, route: str, body: bytes | None = None
    ) -> Generator[tuple[str, bytes], None, None]:
        """Yield the name and the data of each server-sent event. Raises as `ask`."""
        name = ""
        with self.ask(method, route, body) as answer, self._lost(BROKEN_OFF):
            for line in answer:
                if line.startswith(b"event:"):
                    name = line[6:].strip().decode(errors="replace")
                elif line.startswith(b"data:"):
                    yield name, line[5:].strip()

    @contextmanager
    def _lost(self, how: str) -> Iterator[None]:
        """Raise WorkerLost for an error of the connection."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise WorkerLost(f"the API at {self._where} {how}: {reason_of(error)}") from None


def decoded(data: bytes, type_: type[ValueT]) -> ValueT:
    """Decode JSON of an API. WorkerLost: the data are not JSON of the type, as of another version."""
    try:
        return msgspec.json.decode(data, type=type_)
    except ValueError as error:  # MsgspecError, and UnicodeDecodeError for text that is not UTF-8
        raise WorkerLost(f"the API's answer cannot be read: {error}") from None


def _message(body: bytes) -> str:
    """Return the message of an error in OpenAI's form; "" for another body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
