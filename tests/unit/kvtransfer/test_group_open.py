"""What becomes of an `open` whose peer does not come, when the transport is closed meanwhile."""

import secrets
import threading
import time

import pytest
import torch

from baton.errors import TransferFailed
from baton.kvtransfer.group import GroupTransport
from baton.kvtransfer.pair import GroupSettings
from baton.kvtransfer.rendezvous import MeetingPlace
from baton.kvtransfer.transfer_plan import plan_transfer
from baton.layout import PageLayout

LAYOUT = PageLayout(tp_size=1, page_size=16, num_layers=1, num_kv_heads=1, head_dim=16, dtype="bfloat16")


def test_closing_ends_an_open_that_waits_for_its_peer() -> None:
    place = MeetingPlace("127.0.0.1", 5.0)
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
