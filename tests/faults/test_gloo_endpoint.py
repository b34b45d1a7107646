"""Hand-offs over gloo, where an operator asks for it by name; without its door tcp takes its place."""

import pytest

from tests.endpoint_host import Host, HostProcess

NUM_UNITS = 24


@pytest.mark.parametrize("page_size", [16, 32])
def test_a_handoff_over_gloo_arrives_exactly(page_size: int) -> None:
    source = Host(is_shared=False, transport="gloo")
    source.fill(1)
    with HostProcess(page_size=page_size, transport="gloo") as destination:
        for _ in range(3):
            assert source.send(destination.call("address"), NUM_UNITS) == "handed_over"
            outcome, _, digest = destination.call("ended")[-1]
            assert (outcome, digest) == ("adopted", source.sent)
    assert source.transports()["gloo"] == 1
    source.close()


def test_a_destination_that_does_not_open_a_door_to_gloo_is_served_by_tcp() -> None:
    source = Host(is_shared=False, transport="gloo")
    source.fill(1)
    with HostProcess() as destination:
        assert source.send(destination.call("address"), NUM_UNITS) == "handed_over"
        assert destination.call("ended")[-1][2] == source.sent
    assert source.transports()["tcp"] == 1
    source.close()
