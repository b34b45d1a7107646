"""Refuses pages of other sites where no key protects a listener.

A page that a browser of this machine shows can send requests to every port of 127.0.0.1. The browser names
the page's site in Origin, though not with every GET, and the requested name in Host. A name that its owner
has made to mean 127.0.0.1 is not a name of this machine.
"""

from starlette.types import Scope

from baton.gateway.api_errors import ApiError
from baton.gateway.asgi import header
from baton.gateway_config import is_loopback


def check_site(scope: Scope) -> None:
    """Check a request to a loopback listener that needs no key. Raises ApiError 403."""
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


def _hostname(host: str) -> str:
    """Of a Host header: without the port, and the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
