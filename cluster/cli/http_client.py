"""Commands that ask a gateway over HTTP: the options that name it, and requests with the caller's key."""

import argparse
import http.client
import json
from typing import Final
from urllib.parse import urlsplit

from baton.cluster.cli.options import Parser
from baton.cluster.cluster_record import find_record
from baton.config.environment import api_key
from baton.errors import ConfigError, InvalidRequest, WorkerLost

TIMEOUT_S: Final = 600.0


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
    """One gateway. The key comes from BATON_API_KEY or OPENAI_API_KEY unless it is given."""

    def __init__(self, url: str, key: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        """url: with or without /v1. timeout_s: of silence. ConfigError: it is no HTTP URL."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url: expected one such as http://127.0.0.1:8000, got {url!r}")
        secure = parts.scheme == "https"
        self._kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        # The answer owns the socket: it ends with the last byte that is read, or with `close`.
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        key = key or api_key()
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(self, method: str, route: str, body: bytes | None = None) -> http.client.HTTPResponse:
        """Return the answer, of which the body has not been read.

        Raises ConfigError for a wrong key, InvalidRequest and WorkerLost with the gateway's message.
        """
        where = f"{self._host}:{self._port or ''}"
        connection = self._kind(self._host, self._port, timeout=self._timeout_s)
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
