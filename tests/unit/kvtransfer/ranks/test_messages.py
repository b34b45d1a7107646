"""Messages between rank 0 and the agents of the other ranks."""

from typing import Any

import msgspec
import pytest

from baton.errors import WireError
from baton.kvtransfer.endpoint import EndpointSettings
from baton.kvtransfer.protocol.messages import MAX_PAGES, PeerRank, RankListenerAddresses
from baton.kvtransfer.ranks import messages as m
from baton.kvtransfer.transports.base import PieceOutcome
from baton.messages.bounds import MAX_BODY_BYTES
from tests.layouts import a_layout
from tests.transfer_ends import RING

LAYOUT = a_layout(tp_size=2, num_kv_heads=4, dtype="bfloat16")
SETTINGS = EndpointSettings(keys=RING, fingerprint="model", layout=LAYOUT)
LISTENERS = RankListenerAddresses(
    incarnation=b"i" * 16, host="h", device="cpu", addresses={"tcp": "7", "shm": "\0pool"}
)
PEER = PeerRank(host="h", layout=LAYOUT, rank=1, listeners=LISTENERS)
OF_SHARD: dict[str, Any] = {"transfer": b"t" * 16, "shard": 3}
ALL_PAGES = tuple(range(2**31 - MAX_PAGES, 2**31))
ALL_GENERATIONS = tuple(range(2**32 - MAX_PAGES, 2**32))
EVENTS: list[m.ToRankZero] = [
    m.AgentHello(rank=1),
    m.Ready(listeners=LISTENERS),
    m.AllStopped(),
    m.ShardOpened(**OF_SHARD),
    m.WriterStopped(**OF_SHARD),
    m.ShardVerified(**OF_SHARD, corrupt_units=tuple(range(MAX_PAGES))),
    m.ShardReached(**OF_SHARD, transport="shm"),
    m.PushEnded(
        **OF_SHARD,
        first=0,
        stop=MAX_PAGES,
        outcome=PieceOutcome(False, 2**40, "r" * 256),
    ),
    m.UnitsHashed(**OF_SHARD, first=0, stop=MAX_PAGES, digests=bytes(8 * MAX_PAGES)),
    m.UnitsHashed(**OF_SHARD, first=0, stop=1, digests=b"", reason="the digest of a piece failed"),
    m.ShardStopped(**OF_SHARD),
    m.Counted(counts={f"{number:064}": 2**63 - 1 for number in range(m.MAX_COUNTS)}),
]
COMMANDS: list[m.ToAgent] = [
    m.SetUp(settings=SETTINGS.for_rank(1)),
    m.StopAll(),
    m.TellCounts(),
    m.DropLink(link=1),
    m.CloseShard(**OF_SHARD, is_confirmed=True),
    m.HashUnits(**OF_SHARD, first=1, stop=2),
    m.VerifyShard(**OF_SHARD, digests=bytes(8 * MAX_PAGES)),
    m.ReachPeer(
        **OF_SHARD,
        link=1,
        destination=PEER,
        layers=(0, 2),
        digest_key=bytes(32),
        epoch=9,
        pages=ALL_PAGES,
        generations=ALL_GENERATIONS,
        is_bulk=True,
    ),
    m.PushUnits(**OF_SHARD, first=0, stop=MAX_PAGES, more_pages=ALL_PAGES),
    m.StopShard(**OF_SHARD),
    m.ForgetShard(**OF_SHARD),
]


@pytest.mark.parametrize("message", [*COMMANDS, *EVENTS], ids=lambda each: type(each).__name__)
def test_message_of_any_length_survives_the_wire_to_its_side_alone(message: m.ToAgent | m.ToRankZero) -> None:
    body = m.encode(message)
    assert len(body) <= MAX_BODY_BYTES
    readers = m.decode_for_agent, m.decode_for_rank_zero
    read, misread = readers if message in COMMANDS else readers[::-1]
    assert read(body) == message
    with pytest.raises(WireError, match="cannot decode the message"):
        misread(body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transfer", b"short"),
        ("shard", -1),
        ("shard", 256),
        ("first", -1),
        ("stop", 0),
        ("stop", MAX_PAGES + 1),
        ("more_pages", [-1]),
        ("more_pages", [2**31]),
        ("unheard", 1),
    ],
)
def test_field_out_of_bounds_is_refused(field: str, value: object) -> None:
    plain = msgspec.to_builtins(
        m.PushUnits(**OF_SHARD, first=0, stop=1, more_pages=(0,)), builtin_types=(bytes,)
    )
    with pytest.raises(WireError) as refused:
        m.decode_for_agent(msgspec.msgpack.encode({**plain, field: value}))
    assert refused.value.reason == "malformed"
