"""Fixtures for tests of routers that share through Redis."""

import pytest

from baton.router.redis import client


@pytest.fixture
def patient_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep links to Redis up on a busy machine: a reply may take ten seconds.

    A link that goes down drops what routers tell each other, and tests of other things would wait for it.
    """
    monkeypatch.setattr(client, "DEADLINE_S", 10.0)
