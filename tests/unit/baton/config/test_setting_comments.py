from collections.abc import Iterator

import msgspec
import pytest

from baton.config.cluster import ServeConfig, WorkerConfig
from baton.config.gateway import GatewayConfig
from baton.config.loader import comments, described_schema
from baton.config.router import RouterConfig
from baton.gateway.tenants.file import TenantsFile


class Inner(msgspec.Struct):
    size_bytes: int = 4  # ünits: bytes
    plain: int = 0


class Outer(Inner, kw_only=True):
    # What the first line says
    # goes on in the second.
    long: tuple[int, ...] = ()
    behind: dict[str, int] = {}  # behind its last line
    inner: Inner | None = None  # a part


def test_comments_stand_behind_a_field_or_above() -> None:
    assert comments(Outer) == {
        "size_bytes": "ünits: bytes",
        "long": "What the first line says goes on in the second.",
        "behind": "behind its last line",
        "inner": "a part",
    }


def test_schema_holds_the_comments_of_nested_structs() -> None:
    parts = described_schema(Outer)["$defs"]
    assert parts["Inner"]["properties"]["size_bytes"]["description"] == "ünits: bytes"
    assert "description" not in parts["Inner"]["properties"]["plain"]
    assert parts["Outer"]["properties"]["inner"]["description"] == "a part"


@pytest.mark.parametrize("struct", [ServeConfig, GatewayConfig, RouterConfig, WorkerConfig, TenantsFile])
def test_every_setting_is_described_in_its_schema(struct: type[msgspec.Struct]) -> None:
    """A setting without a description needs a comment at its field: say what it does, in what unit."""
    assert [name for name in _undescribed(described_schema(struct))] == []


def _undescribed(schema: dict[str, dict[str, dict[str, dict[str, dict[str, object]]]]]) -> Iterator[str]:
    for part, definition in schema["$defs"].items():
        for name, setting in definition.get("properties", {}).items():
            is_section = "$ref" in str(setting) and part != "TenantsFile"
            if "description" not in setting and not is_section:
                yield f"{part}.{name}"
