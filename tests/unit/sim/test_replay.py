"""A router's recording is replayed bit for bit, and a replay that differs says where."""

import logging
import sys
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.messages.control import Started
from baton.messages.workers import WorkerRole
from baton.router.recording import Decided, Inputs, Recording, decode_chunk
from baton.sim.replay import Replay, frame_chunks, read_bundle
from baton.sim.timed.fast import FastCluster
from baton.sim.timed.fleet import ClientCall, Fleet
from baton.sim.timed.times import Machine
from baton.sim.trouble import Trouble
from baton.sim.world import World

# Seeds: one router with faults and two lives; two routers with the policy cost.
LASTING = [(5, 120.0), *(pytest.param(seed, 600.0, marks=pytest.mark.slow) for seed in (5, 3))]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL):
        yield


@pytest.mark.parametrize(("seed", "seconds"), LASTING)
def test_minutes_with_faults_are_replayed_bit_for_bit(seed: int, seconds: float) -> None:
    world = World(seed, lasts_s=seconds)
    world.run()
    replays = [Replay(recording.chunks()) for recording in world.recordings]
    replayed = [replay.run() for replay in replays]
    assert [each.difference for each in replayed] == [None] * len(replays)
    assert sum(each.seconds for each in replayed) > seconds
    assert sum(len(each.outcomes) for each in replayed) > 2.67 * seconds
    assert any(list(replay.faults()) for replay in replays)


@pytest.mark.parametrize("seed", range(12))
def test_each_kind_of_fault_is_replayed(seed: int) -> None:
    trouble = list(Trouble)[seed % len(Trouble)]
    world = World(seed, trouble=trouble)
    world.run()
    assert world.recordings
    for recording in world.recordings:
        assert Replay(recording.chunks()).run().difference is None


@cache
def rehearsed(policy: str = "cost", kept_s: float = 900.0, memory_bytes: int = 2**26) -> Recording:
    """The recording of a rehearsed router with 400 calls about 12 documents in 40 s."""
    machine = Machine(prefill_s=0.02, prefill_token_s=1e-4, step_base_s=0.01, exposed_s=0.005)
    rehearsal = FastCluster(
        RouterConfig(policy=policy),
        Fleet(num_prefill=3, num_decode=2, decode_keeps=True),
        dict.fromkeys(WorkerRole, machine),
    )
    recording = Recording(kept_s, memory_bytes, lambda: 1.8e9)
    rehearsal.router.record(recording)
    rehearsal.run(
        ClientCall(
            at_s=0.1 * number,
            token_ids=tuple(range(1000 * (number % 12), 1000 * (number % 12) + 320)) + (number,) * 40,
            num_answered=20,
        )
        for number in range(400)
    )
    return recording


def test_dropped_input_is_found() -> None:
    chunks = list(rehearsed().chunks())
    place = next(
        place
        for place, chunk in enumerate(chunks)
        if isinstance(decoded := decode_chunk(chunk), Inputs)
        and any(isinstance(record, Started) for _, _, record in decoded.records)
    )
    decoded = decode_chunk(chunks[place])
    assert isinstance(decoded, Inputs)
    kept = tuple(each for each in decoded.records if not isinstance(each[2], Started))
    chunks[place] = msgspec.msgpack.encode(Inputs(kept))
    difference = Replay(chunks).run().difference
    assert difference is not None and difference.recorded != difference.replayed


def test_last_bit_of_a_prediction_is_compared() -> None:
    chunks = list(rehearsed().chunks())
    for place, chunk in enumerate(chunks):
        decoded = decode_chunk(chunk)
        records = decoded.records if isinstance(decoded, Inputs) else ()
        for number, (at_s, peer, record) in enumerate(records):
            if isinstance(record, Decided) and record.chosen is not None:
                more = msgspec.structs.replace(record.chosen, handoff_s=record.chosen.handoff_s + 2**-60)
                changed = (at_s, peer, msgspec.structs.replace(record, chosen=more))
                chunks[place] = msgspec.msgpack.encode(
                    Inputs((*records[:number], changed, *records[number + 1 :]))
                )
                difference = Replay(chunks).run().difference
                assert difference is not None and difference.number == 0
                return
    raise AssertionError("no decision was predicted")


@pytest.mark.parametrize(("kept_s", "memory_bytes"), [(9.0, 2**26), (900.0, 1_000_000)])
def test_replay_begins_at_a_checkpoint_when_the_beginning_has_left(kept_s: float, memory_bytes: int) -> None:
    replay = Replay(rehearsed(kept_s=kept_s, memory_bytes=memory_bytes).chunks())
    assert replay.checkpoint.at_s > 5.0
    replayed = replay.run()
    assert replayed.difference is None and 0 < len(replayed.outcomes) < 400


@pytest.mark.parametrize("policy", ["cost", "prefix", "least-loaded", "round-robin"])
def test_every_policy_is_replayed(policy: str) -> None:
    replayed = Replay(rehearsed(policy).chunks()).run()
    assert replayed.difference is None and len(replayed.outcomes) >= 400


def test_policy_compared_with_itself_goes_nowhere_else() -> None:
    replayed = Replay(rehearsed("round-robin").chunks()).run("round-robin")
    assert len(replayed.compared) == len(replayed.outcomes)
    assert not any(each.is_elsewhere for each in replayed.compared)


def test_other_policy_is_compared_at_each_decision() -> None:
    replayed = Replay(rehearsed().chunks()).run("round-robin")
    assert replayed.difference is None, "the comparison does not change the replay"
    compared = replayed.compared
    both = [(each.recorded, each.other) for each in compared if each.other is not None]
    assert len(compared) == len(replayed.outcomes) and len(both) == len(compared)
    assert sum(each.is_elsewhere for each in compared) > len(compared) / 4
    assert sum(one.num_held_tokens for one, _ in both) > sum(other.num_held_tokens for _, other in both)
    assert sum(one.ttft_s for one, _ in both) < sum(other.ttft_s for _, other in both)


def test_unknown_policy_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cost'"):
        Replay(rehearsed().chunks()).run("costs")


def test_recording_without_a_checkpoint_is_an_error() -> None:
    with pytest.raises(ConfigError, match="does not begin with a router's state"):
        Replay(rehearsed().chunks()[1:])
    with pytest.raises(ConfigError, match="cannot be read"):
        Replay([b"junk"])


def damaged(**changes: object) -> list[bytes]:
    """The chunks of a recording with other values in its first checkpoint."""
    first, *others = rehearsed().chunks()
    return [msgspec.msgpack.encode({**msgspec.msgpack.decode(first), **changes}), *others]


@pytest.mark.parametrize(
    "state",
    [
        msgspec.msgpack.encode(None),
        b"\x91" * 50_000 + b"\x01",
        msgspec.msgpack.encode(["outside", "clock"]),
        msgspec.msgpack.encode(["_setattr__", "_policy_module", "subprocess"]),
        msgspec.msgpack.encode(["random", ["tuple", [3, ["tuple", [-1] * 625], None]]]),
    ],
)
def test_damaged_state_is_an_error(state: bytes) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Replay(damaged(state=state)).run()


def test_text_that_is_no_text_is_an_error() -> None:
    first, *others = rehearsed().chunks()
    with pytest.raises(ConfigError, match="cannot be read"):
        Replay([first.replace(b"machine", b"\xf5achine"), *others])


def bundle_of(path: Path, chunks: Iterable[bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"routers/{'0' * 32}/recording", frame_chunks(list(chunks)))
    return path


def test_bundle_runs_no_code_that_it_names_itself(tmp_path: Path) -> None:
    config = {
        **msgspec.to_builtins(Replay(rehearsed().chunks()).checkpoint.config),
        "policy": "antigravity:Policy",
    }
    path = bundle_of(tmp_path / "bundle", damaged(config=config))
    with pytest.raises(ConfigError, match="--own-policy antigravity:Policy"):
        read_bundle(path)
    assert "antigravity" not in sys.modules
    (replay,) = read_bundle(path, "antigravity:Policy")
    assert replay.checkpoint.config.policy == "antigravity:Policy"


def test_chunk_without_bytes_is_damage(tmp_path: Path) -> None:
    path = bundle_of(tmp_path / "bundle", [*rehearsed().chunks(), b""])
    with pytest.raises(ConfigError, match="a chunk is empty"):
        read_bundle(path)


def test_bundle_that_is_too_large_is_not_unpacked(tmp_path: Path) -> None:
    path = bundle_of(tmp_path / "bundle", rehearsed().chunks())
    told = bytearray(path.read_bytes())
    size = told.index(b"PK\1\2") + 24  # of the member, unpacked, in the directory at the end
    told[size : size + 4] = b"\xfe\xff\xff\xff"
    path.write_bytes(told)
    with pytest.raises(ConfigError, match="more than"):
        read_bundle(path)
