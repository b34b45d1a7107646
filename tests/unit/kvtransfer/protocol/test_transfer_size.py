"""The sizes of transfers and pulls that messages can carry."""

from typing import Any

import pytest

from baton.kvtransfer.protocol.messages import MAX_DIGESTS, MAX_PAGES, MAX_PARTS
from baton.kvtransfer.protocol.pull import WantedPage, check_pull, transfer_size

ID = b"t" * 16
ALL_PARTS_UNITS = MAX_DIGESTS // MAX_PARTS


@pytest.mark.parametrize(
    ("num_units", "num_parts"), [(1, 1), (MAX_PAGES, 1), (1, MAX_PARTS), (ALL_PARTS_UNITS, MAX_PARTS)]
)
def test_size_that_messages_can_carry_is_taken(num_units: int, num_parts: int) -> None:
    size = transfer_size(ID, num_units, num_parts, 0.5, position=2**31 - 1)
    assert (size.num_units, size.num_parts, size.deadline_ms) == (num_units, num_parts, 500)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_units": 0},
        {"num_units": MAX_PAGES + 1},
        {"num_parts": 0},
        {"num_parts": MAX_PARTS + 1},
        {"num_units": ALL_PARTS_UNITS + 1, "num_parts": MAX_PARTS},
        {"deadline_s": 0.0},
        {"deadline_s": 86_401.0},
        {"transfer": b""},
        {"transfer": b"t" * 17},
        {"position": -1},
        {"position": 2**31},
    ],
)
def test_what_no_message_can_say_is_our_mistake(wrong: dict[str, Any]) -> None:
    fields = {"transfer": ID, "num_units": 1, "num_parts": 1, "deadline_s": 1.0, **wrong}
    with pytest.raises(ValueError, match="transfer|token"):
        transfer_size(**fields)


@pytest.mark.parametrize(
    ("wanted", "num_pages"),
    [
        ([], 1),
        ([WantedPage(0, 0, bytes(16))], 2**15 + 1),
        ([WantedPage(-1, 0, bytes(16))], 1),
        ([WantedPage(0, 2**32, bytes(16))], 1),
        ([WantedPage(0, 1, bytes(15))], 1),
    ],
)
def test_pages_that_nobody_can_hold_are_not_pulled(wanted: list[WantedPage], num_pages: int) -> None:
    with pytest.raises(ValueError, match="page"):
        check_pull(wanted, num_pages)


def test_a_short_deadline_is_a_millisecond_at_least() -> None:
    assert transfer_size(ID, 1, 1, 1e-6).deadline_ms == 1
