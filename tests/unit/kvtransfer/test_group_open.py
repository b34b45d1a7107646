"""What becomes of an `open` whose peer does not come, and how two that come get their connection."""

import secrets
import socket
import threading
import time

import pytest
import torch

from baton.errors import TransferFailed
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.transports.listener import Listener
from baton.kvtransfer.transports.rank_pair import GroupSettings
from baton.kvtransfer.transports.rendezvous import RendezvousServer, reach
from baton.kvtransfer.transports.torch_distributed import GroupTransport
from baton.pages import PageLayout

LAYOUT = PageLayout(tp_size=1, page_size=16, num_layers=1, num_kv_heads=1, head_dim=16, dtype="bfloat16")


def test_closing_ends_an_open_that_waits_for_its_peer() -> None:
    place = RendezvousServer("127.0.0.1", 5.0)
    meeting = place.meeting(secrets.token_bytes(32))  # to which nobody comes
    pool = torch.zeros(4, LAYOUT.page_bytes, dtype=torch.uint8)
    plan, settings = plan_transfer(LAYOUT, LAYOUT, 0, 0), GroupSettings(connect_s=2.0)
    transport = GroupTransport("gloo", lambda: meeting, pool, plan, settings=settings)
    outcomes: list[str] = []

    def open_it() -> None:
        with pytest.raises(TransferFailed) as raised:
            transport.open()
        outcomes.append(str(raised.value))

    opening = threading.Thread(target=open_it)
    opening.start()
    time.sleep(0.1)
    transport.close()
    opening.join(0.5)
    assert outcomes == ["gloo: the transport was closed"]
    transport.close()
    for thread in threading.enumerate():  # it is let out when torch's own wait is over
        if thread.name == "gloo-meet":
            thread.join(10)
    place.close()


def test_those_who_have_met_are_not_cut_off_when_the_port_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    greet = Listener._serve
    has_met = threading.Event()

    def greet_slowly(acceptor: Listener, sock: socket.socket) -> None:
        """As a thread that gets no processor between the greeting's last line and its own end."""
        wrapped = acceptor._greet
        acceptor._greet = lambda newcomer: (wrapped(newcomer), has_met.wait(5.0))[0]
        greet(acceptor, sock)

    monkeypatch.setattr(Listener, "_serve", greet_slowly)
    place = RendezvousServer("127.0.0.1", 5.0)
    meeting = place.meeting(secrets.token_bytes(32))
    source = reach(meeting, 5.0, "gloo")
    destination = place.wait_for_source(meeting)
    has_met.set()
    for mine, theirs in ((source, destination), (destination, source)):
        mine.set("key", b"value")
        assert theirs.get("key") == b"value"
    source.close()
    destination.close()
    place.close()
