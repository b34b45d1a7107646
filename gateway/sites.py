"""Whether a request is from this machine, and from a program rather than a page of another site.

Whoever makes a browser of this machine open a page can have it ask whatever listens here. A browser says in
Origin which site a page is of, though not with every GET, and in Host which name was asked for: one that its
owner has made to mean 127.0.0.1 is not ours.
"""

from typing import Final

from starlette.types import Scope

from baton.gateway.api_errors import ApiError
from baton.gateway.asgi import header
from baton.gateway_config import is_loopback

# What a proxy adds: whom it speaks for is somewhere else.
FORWARDED: Final = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")


def check_site(scope: Scope) -> None:
    """For a gateway that needs no keys, and so listens on loopback. Raises ApiError 403."""
    host, origin = header(scope, b"host"), header(scope, b"origin")
    if host is not None and not is_loopback(_hostname(host)):
        raise ApiError(
            403,
            "without keys only this machine's own names are served, such as localhost and 127.0.0.1: "
            "send one of them as Host, or start the server with --tenants",
            code="host",
        )
    if origin is not None and origin.partition("://")[2] != (host or ""):
        raise ApiError(403, "pages of other sites may not use this server", code="origin")


def is_from_here(scope: Scope) -> bool:
    """A program of this machine has asked for itself."""
    client = scope.get("client")
    if client is None or not is_loopback(client[0]):
        return False
    if any(header(scope, name) is not None for name in FORWARDED):
        return False
    try:
        check_site(scope)
    except ApiError:
        return False
    return True


def _hostname(host: str) -> str:
    """Of a Host header: without the port, and the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
