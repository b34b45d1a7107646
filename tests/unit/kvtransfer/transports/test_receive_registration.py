import random
import threading

import pytest

from baton.errors import TransferFailed, WireError
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.transports.receive_registration import (
    NUM_REMEMBERED,
    ReceiveRegistration,
    ReceiveRegistrations,
)
from tests.layouts import a_layout

LAYOUT = a_layout(page_size=4, num_layers=1, num_kv_heads=1, head_dim=2)
PLAN = plan_transfer(LAYOUT, LAYOUT, 0, 0)
UNIT = PLAN.sent_unit_bytes
ID, OTHER = b"a" * 16, b"b" * 16
WRITER = b"w" * 16


def registration(transfer: bytes = ID, *, direct: bool = False, epoch: int = 3) -> ReceiveRegistration:
    return ReceiveRegistration(
        id=transfer,
        epoch=epoch,
        plan=PLAN,
        num_units=3,
        pages=(7, 2, 5),
        writer=WRITER,
        may_write_directly=direct,
    )


@pytest.fixture
def registrations() -> ReceiveRegistrations:
    return ReceiveRegistrations(num_pages=8)


def test_writer_without_a_grant_is_not_admitted(registrations: ReceiveRegistrations) -> None:
    registrations.add(registration())
    assert registrations.begin(OTHER, 3, 0, 1, UNIT) is None
    assert registrations.begin(ID, 2, 0, 1, UNIT) is None
    registrations.close(ID, lambda: None)
    assert registrations.begin(ID, 3, 0, 1, UNIT) is None
    assert registrations.counts() == {"unknown_pieces": 1, "stale_pieces": 2}


@pytest.mark.parametrize(
    ("first", "stop", "num_bytes"),
    [(0, 4, 4 * UNIT), (2, 2, 0), (2, 1, UNIT), (0, 2, UNIT), (0, 1, UNIT + 1), (2**32 - 1, 1, UNIT)],
)
def test_a_piece_that_the_plan_does_not_have_drops_the_peer(
    registrations: ReceiveRegistrations, first: int, stop: int, num_bytes: int
) -> None:
    registrations.add(registration())
    with pytest.raises(WireError):
        registrations.begin(ID, 3, first, stop, num_bytes)
    assert registrations.counts() == {"malformed_pieces": 1}
    safe: list[int] = []
    registrations.close(ID, lambda: safe.append(1))
    assert safe == [1]


def test_pages_are_safe_when_the_last_writer_has_left(registrations: ReceiveRegistrations) -> None:
    registrations.add(registration())
    writings = [registrations.begin(ID, 3, unit, unit + 1, UNIT) for unit in range(2)]
    safe: list[int] = []
    registrations.close(ID, lambda: safe.append(1))
    registrations.close(ID, lambda: safe.append(2))
    for writing in writings:
        assert not safe and writing is not None and writing.must_stop
        registrations.end(writing, is_whole=False)
    assert safe == [1, 2] and registrations.counts()["broken_pieces"] == 2
    registrations.close(ID, lambda: safe.append(3))
    assert safe == [1, 2, 3] and registrations.num_open() == 0


def test_direct_writer_holds_the_pages_until_it_releases_them(registrations: ReceiveRegistrations) -> None:
    registrations.writer_came(WRITER)
    registrations.add(registration(direct=True))
    safe: list[int] = []
    registrations.close(ID, lambda: safe.append(1))
    assert not safe and registrations.num_open() == 1
    registrations.release(ID)
    assert safe == [1] and registrations.num_open() == 0
    registrations.release(ID)
    assert safe == [1]


def test_death_of_a_writer_ends_its_holds_and_names_its_open_transfers(
    registrations: ReceiveRegistrations,
) -> None:
    registrations.writer_came(WRITER)
    registrations.add(registration(direct=True))
    registrations.add(registration(OTHER, direct=True))
    safe: list[int] = []
    registrations.close(ID, lambda: safe.append(1))
    assert registrations.writer_died(WRITER) == [OTHER] and safe == [1]
    registrations.close(OTHER, lambda: safe.append(2))
    assert safe == [1, 2]
    registrations.add(registration(b"c" * 16, direct=True))
    registrations.close(b"c" * 16, lambda: safe.append(3))
    assert safe == [1, 2, 3]  # the dead write nothing


def test_late_writer_holds_the_open_registrations(registrations: ReceiveRegistrations) -> None:
    for transfer, direct in ((ID, True), (OTHER, False)):
        registrations.add(registration(transfer, direct=direct))
    registrations.writer_came(WRITER)
    safe: list[bytes] = []
    for transfer in (ID, OTHER):
        registrations.close(transfer, lambda transfer=transfer: safe.append(transfer))  # type: ignore[misc]
    assert safe == [OTHER]
    registrations.writer_died(WRITER)
    assert safe == [OTHER, ID]


def test_an_id_serves_once_at_a_time_and_again_for_damaged_units(registrations: ReceiveRegistrations) -> None:
    registrations.add(registration())
    with pytest.raises(TransferFailed, match="exists"):
        registrations.add(registration())
    registrations.close(ID, lambda: None)
    registrations.add(registration())
    assert registrations.begin(ID, 3, 0, 1, UNIT) is not None


@pytest.mark.parametrize("pages", [(0, 1), (0, 1, 8), (0, -1, 2), (0, 1, 2, 3)])
def test_pages_must_be_there_and_enough(registrations: ReceiveRegistrations, pages: tuple[int, ...]) -> None:
    wrong = ReceiveRegistration(id=ID, epoch=1, plan=PLAN, num_units=3, pages=pages, writer=WRITER)
    with pytest.raises(ValueError, match="pages"):
        registrations.add(wrong)


def test_memory_of_ended_transfers_is_bounded(registrations: ReceiveRegistrations) -> None:
    for number in range(NUM_REMEMBERED + 1):
        transfer = number.to_bytes(16, "big")
        registrations.add(registration(transfer))
        registrations.close(transfer, lambda: None)
    assert registrations.begin((0).to_bytes(16, "big"), 3, 0, 1, UNIT) is None
    assert registrations.begin((1).to_bytes(16, "big"), 3, 0, 1, UNIT) is None
    assert registrations.counts() == {"unknown_pieces": 1, "stale_pieces": 1}


def test_no_writer_is_inside_when_the_pages_are_safe() -> None:
    for seed in range(50):
        registrations = ReceiveRegistrations(num_pages=8)
        registrations.add(registration())
        inside: set[int] = set()
        seen: list[set[int]] = []

        def write(
            number: int, registrations: ReceiveRegistrations = registrations, inside: set[int] = inside
        ) -> None:
            while (writing := registrations.begin(ID, 3, 0, 1, UNIT)) is not None:
                inside.add(number)
                inside.discard(number)
                registrations.end(writing, is_whole=True)

        writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for writer in writers:
            writer.start()
        threading.Event().wait(random.Random(seed).random() / 1000)
        registrations.close(ID, lambda seen=seen, inside=inside: seen.append(set(inside)))  # type: ignore[misc]
        for writer in writers:
            writer.join()
        assert seen == [set()] and registrations.num_open() == 0
