import pytest

from baton.config.gateway import GatewayConfig, is_loopback
from baton.config.loader import build
from baton.errors import ConfigError
from baton.messages.workers import Address

ROUTER = Address("127.0.0.1", 1)


def config(**settings: object) -> GatewayConfig:
    return GatewayConfig(**{"model": "m", "routers": (ROUTER,), **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", ""])
def test_public_address_needs_keys(host: str) -> None:
    with pytest.raises(ConfigError, match="needs keys"):
        config(host=host)
    assert config(host=host, tenants_file="t.yaml").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_address_needs_no_keys(host: str) -> None:
    assert is_loopback(config(host=host).host)


def test_values_out_of_range_are_refused() -> None:
    routers = (("127.0.0.1", 1),)
    for name, value in (("port", 65_536), ("max_body_bytes", 1), ("body_timeout_s", float("nan"))):
        with pytest.raises(ConfigError, match=f"^{name}: expected .*, at least .*, at most .*, got {value}"):
            build(GatewayConfig, {"model": "m", "routers": routers, name: value})
    with pytest.raises(ConfigError, match="^gateway.model: expected a directory"):
        config(model="")
