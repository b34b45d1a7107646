"""When an end of a connection pings and when it gives up, by a clock that stands still until it is moved."""

import pytest

from baton.errors import WireError
from baton.rpc.liveness import PING_S, LinkLife

TICK_S = 0.25


def run(life: LinkLife, from_s: float, seconds: float) -> list[bytes]:
    """The pings of so many seconds of ticks, from a tick after `from_s` on."""
    ticks = [from_s + TICK_S * number for number in range(1, round(seconds / TICK_S) + 1)]
    return [ping for now_s in ticks if (ping := life.tick(now_s)) is not None]


def test_silent_peer_is_dropped_after_the_timeout_and_no_sooner() -> None:
    life = LinkLife(8.0, 100.0)
    run(life, 100.0, 8.0)
    with pytest.raises(WireError, match="nothing has come from the peer for 8 s") as raised:
        life.tick(108.25)
    assert raised.value.reason == "silent"


def test_any_byte_counts_as_life() -> None:
    life = LinkLife(8.0, 100.0)
    run(life, 100.0, 7.5)
    life.heard(107.5)
    run(life, 107.5, 8.0)
    assert life.silence_s(108.5) == pytest.approx(1.0)


def test_pings_leave_regularly_and_say_for_how_long_nothing_came() -> None:
    life, peer = LinkLife(8.0, 100.0), LinkLife(8.0, 500.0)
    pings = run(life, 100.0, 4.0)
    assert len(pings) == 4.0 / PING_S
    assert peer.take_ping(pings[-1])
    assert peer.silence_s(500.0) == pytest.approx(4.0)


def test_end_whose_frames_do_not_arrive_drops_the_link() -> None:
    life, peer = LinkLife(60.0, 100.0), LinkLife(8.0, 100.0)
    dropped_s = None
    for step in range(1, 100):
        now_s = 100.0 + TICK_S * step
        ping = life.tick(now_s)
        if ping is not None:
            peer.heard(now_s)
            assert peer.take_ping(ping)
        try:
            peer.tick(now_s)
        except WireError as error:
            assert error.reason == "unheard"
            dropped_s = now_s
            break
    assert dropped_s == pytest.approx(108.0 + PING_S)


def test_time_in_which_the_process_itself_stood_still_is_nobodys_silence() -> None:
    life = LinkLife(8.0, 100.0)
    run(life, 100.0, 2.0)
    life.tick(160.0)
    assert life.silence_s(160.0) == pytest.approx(2.0)
    with pytest.raises(WireError):
        run(life, 160.0, 6.5)


def test_silence_in_short_pauses_of_the_process_still_adds_up() -> None:
    life = LinkLife(8.0, 100.0)
    with pytest.raises(WireError):
        for number in range(1, 12):
            life.tick(100.0 + 0.9 * number)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\xc1\0\0\0\0\0", b"\x81\0\0\0\0"])
def test_other_bodies_are_no_pings(body: bytes) -> None:
    life = LinkLife(8.0, 100.0)
    assert not life.take_ping(body)
    assert life.silence_s(100.0) == 0.0
