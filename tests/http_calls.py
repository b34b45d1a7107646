"""Calls over HTTP of a server under test."""

from typing import Any, Final

import httpx2

CALL_TIMEOUT_S: Final = 60.0


class HttpCalls:
    """A server that has a URL; each call has a connection of its own."""

    @property
    def url(self) -> str:
        raise NotImplementedError

    def http(self, method: str, path: str, /, **fields: Any) -> httpx2.Response:
        """Return the answer of any status. fields: of the JSON body; without fields there is no body."""
        return httpx2.request(method, self.url + path, json=fields or None, timeout=CALL_TIMEOUT_S)

    def get(self, path: str, /) -> httpx2.Response:
        """Return the answer. httpx2.HTTPStatusError: it is no success."""
        return self.http("GET", path).raise_for_status()

    def ask(self, path: str, /, **fields: Any) -> Any:
        """Return the JSON of the answer to a POST, which must be 200."""
        answer = self.http("POST", path, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, /, **fields: Any) -> Any:
        """Return the error of the answer to a POST, which must be 400."""
        answer = self.http("POST", path, **fields)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]
