"""Who counts as of this machine."""

from typing import Any

import pytest

from baton.gateway.sites import is_from_here


def scope(peer: str | None, **headers: str) -> dict[str, Any]:
    named = {"host": "localhost", **headers}
    return {
        "client": None if peer is None else (peer, 5),
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()],
    }


@pytest.mark.parametrize(
    ("asked", "is_here"),
    [
        (scope("127.0.0.1"), True),
        (scope("::1"), True),
        (scope("127.0.0.1", origin="http://localhost"), True),
        (scope("10.0.0.9"), False),
        (scope("10.0.0.9", host="127.0.0.1"), False),
        (scope("8.8.8.8"), False),
        (scope(None), False),
        (scope("127.0.0.1", host="evil.example"), False),
        (scope("127.0.0.1", origin="http://evil.example"), False),
        (scope("127.0.0.1", x_forwarded_for="127.0.0.1"), False),
        (scope("127.0.0.1", x_real_ip="127.0.0.1"), False),
        (scope("127.0.0.1", via="1.1 proxy"), False),
    ],
)
def test_only_a_program_of_this_machine_is_from_here(asked: dict[str, Any], is_here: bool) -> None:
    assert is_from_here(asked) is is_here
