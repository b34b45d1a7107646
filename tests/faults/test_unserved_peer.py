"""A transport asked for by name that cannot serve a peer: the peer is refused, nobody else hears of it."""

import pytest

from baton.errors import ConfigError, TransferFailed
from tests.endpoint_host import Host, HostProcess

NUM_UNITS = 24


def test_host_that_dials_hears_why() -> None:
    strict = Host(is_shared=False, transport="cuda_ipc")
    with HostProcess() as source, pytest.raises(ConfigError, match="cuda_ipc cannot serve"):
        strict.grant(source.call("address"), "ab" * 16, NUM_UNITS)
    strict.close()


def test_an_endpoint_that_is_dialled_goes_on() -> None:
    source = Host(is_shared=False)
    source.fill(1)
    with HostProcess(transport="cuda_ipc") as strict, HostProcess() as destination:
        for _ in range(2):
            try:
                assert source.send(strict.call("address"), NUM_UNITS) == "failed"
            except TransferFailed:
                continue  # it had hung up already
        assert strict.call("counts")["open"] == 0
        assert source.send(destination.call("address"), NUM_UNITS) == "handed_over"
    source.close()
