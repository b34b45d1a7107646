"""Valid streams of frames, and typed ways to damage them."""

import random
from collections.abc import Callable
from typing import Any, Final

import msgspec

from baton.kvtransfer.protocol import messages as m
from baton.messages.bounds import MAX_FRAME_BYTES
from baton.rpc.session import encode_frame
from tests.layouts import a_layout
from tests.numbered_pages import key_of

NUM_TRANSFERS: Final = 4
LAYOUT: Final = a_layout()
LISTENERS: Final = (
    m.RankListenerAddresses(incarnation=bytes(16), host="h", device="cpu", addresses={"tcp": "1"}),
)
# Of every type that msgpack has, at and beyond the bounds.
ODD_VALUES: Final[list[object]] = [
    None,
    True,
    0,
    -1,
    2**31,
    2**32,
    2**63,
    2**64 - 1,
    -(2**63),
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x" * 300,
    "\x00\ud7ff",
    b"",
    b"x" * 15,
    b"x" * 17,
    [],
    [0] * 3,
    [-1],
    [[[[[]]]]],
    {},
    {"kind": "Abort"},
    msgspec.msgpack.Ext(1, b"x"),
]
# Bodies that announce more than they bring, or nest without end.
BOMBS: Final[list[bytes]] = [
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xdb\xff\xff\xff\xff",  # text
    b"\x91" * 100_000,
    b"\x81\xa4kind" * 1_000,
    b"\x81\xa4kind\xdd\xff\xff\xff\xff",
    b"\x83\xa4kind\xa5Grant\xa5pages\xdd\xff\xff\xff\xff\x01",
    b"\x82\xa4kind\xa5Grant\xa5pages\xdd\x00\x01\x00\x00",
    b"",
]


def valid_message(rng: random.Random) -> m.AnyMessage:
    transfer = rng.randrange(NUM_TRANSFERS).to_bytes(16, "big")
    epoch, num_units = rng.randint(1, 3), rng.choice([1, 2, 3, 8, 40])
    pages = tuple(rng.sample(range(64), num_units))
    generations = tuple(rng.randrange(3) for _ in pages)
    first = rng.randrange(num_units)
    units = tuple(sorted(rng.sample(range(num_units), rng.randint(1, num_units))))
    makers: list[Callable[[], m.AnyMessage]] = [
        lambda: m.EndpointHello(
            protocol=1, incarnation=bytes(16), fingerprint="f", layout=LAYOUT, listeners=LISTENERS
        ),
        lambda: m.Grant(
            transfer=transfer,
            epoch=epoch,
            deadline_ms=1000,
            num_units=num_units,
            num_layer_groups=rng.randint(1, 2),
            pages=pages,
            generations=generations,
        ),
        lambda: m.PullRequest(
            transfer=transfer,
            epoch=epoch,
            deadline_ms=1000,
            num_units=num_units,
            wanted_keys=b"".join(map(key_of, range(num_units))),
            pages=pages,
            generations=generations,
        ),
        lambda: m.Wrote(transfer=transfer, epoch=epoch, first=first, stop=num_units),
        lambda: m.Commit(
            transfer=transfer, epoch=epoch, first=first, stop=num_units, digests=bytes(8 * num_units)
        ),
        lambda: m.Verified(transfer=transfer, epoch=epoch),
        lambda: m.Corrupt(transfer=transfer, epoch=epoch, units=units),
        lambda: m.Extend(transfer=transfer, epoch=epoch),
        lambda: m.Abort(transfer=transfer, epoch=epoch, reason="no more"),
        lambda: m.Released(transfer=transfer),
        m.EndpointClosed,
    ]
    return rng.choice(makers)()


def valid_frames(rng: random.Random) -> list[bytes]:
    return [encode_frame(m.encode(valid_message(rng))) for _ in range(rng.randint(1, 12))]


def mutated(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """The frames, damaged in one way, or in two."""
    for _ in range(1 if rng.randrange(4) else 2):
        frames = rng.choice(MUTATIONS)(rng, frames, rng.randrange(len(frames)))
    return frames


def _flip_bits(rng: random.Random, frames: list[bytes], index: int) -> list[bytes]:
    frame = bytearray(frames[index] or b"x")
    for _ in range(rng.randint(1, 8)):
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return [*frames[:index], bytes(frame), *frames[index + 1 :]]


def _truncate(rng: random.Random, frames: list[bytes], index: int) -> list[bytes]:
    return [*frames[:index], frames[index][: rng.randrange(len(frames[index]) + 1)]]


def _splice(rng: random.Random, frames: list[bytes], index: int) -> list[bytes]:
    frame, other = frames[index], encode_frame(m.encode(valid_message(rng)))
    cut, into = rng.randrange(len(frame) + 1), rng.randrange(len(other))
    return [*frames[:index], frame[:cut] + other[into:], *frames[index + 1 :]]


def _edit_length(rng: random.Random, frames: list[bytes], index: int) -> list[bytes]:
    length = len(frames[index]) - 4
    lengths = [0, 1, length - 1, length + 1, length * 2, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, 2**32 - 1]
    edited = max(0, rng.choice(lengths)).to_bytes(4, "big") + frames[index][4:]
    return [*frames[:index], edited, *frames[index + 1 :]]


def _swap_type(rng: random.Random, frames: list[bytes], index: int) -> list[bytes]:
    """One field has a value of another type, or beyond its bounds; or a field is missing, or too many."""
    try:
        fields: dict[str, Any] = msgspec.msgpack.decode(frames[index][5:], type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError):  # damaged before
        return _flip_bits(rng, frames, index)
    if not fields:
        return frames
    name = rng.choice(sorted(fields))
    action = rng.randrange(8)
    if action == 0:
        del fields[name]
    elif action == 1:
        fields[rng.choice(["extra", "", "kind2"])] = rng.choice(ODD_VALUES)
    elif action == 2 and isinstance(fields[name], list) and fields[name]:
        fields[name][rng.randrange(len(fields[name]))] = rng.choice(ODD_VALUES)
    elif action == 3:
        fields["kind"] = m.decode(m.encode(valid_message(rng))).__class__.__name__
    else:
        fields[name] = rng.choice(ODD_VALUES)
    return [*frames[:index], encode_frame(msgspec.msgpack.encode(fields)), *frames[index + 1 :]]


def _shuffle(rng: random.Random, frames: list[bytes], index: int) -> list[bytes]:
    return rng.sample(frames, len(frames))


def _repeat(rng: random.Random, frames: list[bytes], index: int) -> list[bytes]:
    return [*frames[: index + 1], *frames[index:]]


def _drop(rng: random.Random, frames: list[bytes], index: int) -> list[bytes]:
    return [*frames[:index], *frames[index + 1 :]] or frames


def _bomb(rng: random.Random, frames: list[bytes], index: int) -> list[bytes]:
    return [*frames[:index], encode_frame(rng.choice(BOMBS)), *frames[index:]]


def _noise(rng: random.Random, frames: list[bytes], index: int) -> list[bytes]:
    return [*frames[:index], rng.randbytes(rng.randint(1, 64)), *frames[index:]]


MUTATIONS: Final = (
    [_flip_bits, _truncate, _splice, _edit_length, _shuffle, _repeat, _drop, _noise] * 3
    + [_swap_type] * 8
    + [_bomb]
)
