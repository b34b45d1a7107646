"""HTTP servers of tests, on loopback."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Answering(BaseHTTPRequestHandler):
    """Answers requests and logs nothing. Subclasses have `get` or `post`, or both."""

    def do_GET(self) -> None:
        self.get()

    def do_POST(self) -> None:
        self.post()

    def get(self) -> None:
        """Answer a GET."""
        self.send_error(501)

    def post(self) -> None:
        """Answer a POST."""
        self.send_error(501)

    def body(self) -> bytes:
        """Return the body of the request."""
        return self.rfile.read(int(self.headers["content-length"]))

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Send an answer, with its length unless the headers say that it comes in chunks."""
        headers = headers or {}
        length = {} if "Transfer-Encoding" in headers else {"Content-Length": str(len(body))}
        self.send_response(status)
        for name, value in (length | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def serving(handler: type[Answering]) -> Iterator[int]:
    """Serve with handlers of this class; yield the port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
