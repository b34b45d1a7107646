"""HTTP as bytes of a socket, for tests of a server's limits."""

import socket

SIZE = 65_536


def post_bytes(body: bytes, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    """Return a POST request."""
    lines = [b"POST " + path + b" HTTP/1.1", b"host: localhost", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


def status(answer: bytes) -> int:
    """Return the status of an answer."""
    return int(answer.split(b" ", 2)[1])


def read_until(client: socket.socket, end: bytes) -> bytes:
    """Return what comes until `end` has come."""
    answer = b""
    while end not in answer:
        data = client.recv(SIZE)
        assert data, f"the answer ended without {end!r}: {answer[-300:]!r}"
        answer += data
    return answer


def read_all(client: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    parts = []
    try:
        while data := client.recv(SIZE):
            parts.append(data)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def read_response(client: socket.socket) -> bytes:
    """Return one answer of a connection that is kept."""
    head, _, body = read_until(client, b"\r\n\r\n").partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        data = client.recv(SIZE)
        assert data, f"the answer ended after {len(body)} of {length} bytes"
        body += data
    return head + body


def exchange(client: socket.socket, *sent: bytes) -> bytes:
    """Return all bytes that come until the server closes the connection. Closes the client."""
    with client:
        for data in sent:
            client.sendall(data)
        return read_all(client)
