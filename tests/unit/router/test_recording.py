"""The records of a router, and their age; checkpoints name only the code of the router."""

import msgspec
import pytest

from baton.errors import ConfigError
from baton.messages.control import Submit
from baton.messages.operations import RecordingQuery
from baton.request import Request, SamplingParams, StructuredOutputs, TokenIds
from baton.router.checkpoint import attributes_of, bare_request, load, save
from baton.router.recording import Inputs, Recording, RouterCheckpoint, Submitted, decode_chunk
from baton.router.router import Router
from baton.tenants import SchedulingKey, Sla
from tests.node_peers import a_request, id_of
from tests.unit.router.router_cluster import Cluster, cluster

SECRET_TOKENS = tuple(range(70_001, 70_065))


def recorded() -> tuple[Cluster, Recording]:
    c = cluster("p0", "d0", policy="cost")
    recording = Recording(60.0, 2**24)
    c.router.record(recording)
    return c, recording


def submit(c: Cluster, name: str = "r") -> None:
    sampling = SamplingParams(structured_outputs=StructuredOutputs(regex="canary-form"), max_tokens=5)
    request = Request(
        request_id=id_of(name),
        token_ids=TokenIds.of(SECRET_TOKENS),
        sampling=sampling,
        cache_salt=b"canary-salt",
        generated_token_ids=(80_001, 80_002),
    )
    c["g"].say(Submit(request=request))


def test_tokens_salts_and_forms_are_not_recorded() -> None:
    c, recording = recorded()
    for number in range(40):  # some of them stay in the queue, and are in the state of the checkpoint
        submit(c, f"r{number}")
    c.clock.advance(30.0)
    c.router.tick()
    chunks = recording.chunks()
    assert sum(isinstance(decode_chunk(chunk), RouterCheckpoint) for chunk in chunks) == 2
    joined = b"".join(chunks)
    for canary in (TokenIds.of(SECRET_TOKENS[:4]).packed, b"canary-salt", b"canary-form"):
        assert canary not in joined
    numbers = msgspec.msgpack.encode(SECRET_TOKENS[0]), msgspec.msgpack.encode(80_001)
    assert not any(number in joined for number in numbers)
    records = [
        record
        for chunk in chunks
        if isinstance(each := decode_chunk(chunk), Inputs)
        for record in each.records
    ]
    submitted = [record for _, _, record in records if isinstance(record, Submitted)]
    assert len(submitted) == 40 and submitted[0].num_prompt_tokens == len(SECRET_TOKENS)


def test_recorded_submit_has_all_that_routing_reads() -> None:
    request = Request(
        request_id=id_of("r"),
        token_ids=TokenIds.of(range(1, 8)),
        sampling=SamplingParams(
            max_tokens=9, min_tokens=2, logprobs=3, prompt_logprobs=1, seed=5, stop_token_ids=(4,)
        ),
        tenant="acme",
        cache_salt=b"salt",
        priority=-2,
        sla=Sla(ttft_ms=250),
        scheduling_key=SchedulingKey(weight=2.0, rank=1),
        attempt=1,
        generated_token_ids=(3, 4),
        is_probe=True,
    )
    submit = Submit(request=request, sticky_worker="a", avoid=("b",), age_s=0.5, is_begun=True)
    again = Submitted.of(submit).replayed()
    assert again == msgspec.structs.replace(submit, request=bare_request(request))
    names = Request.__struct_fields__
    changed = {name for name in names if getattr(again.request, name) != getattr(request, name)}
    assert changed == {"token_ids", "generated_token_ids", "sampling", "cache_salt"}


def test_record_of_a_plain_submit_is_small() -> None:
    submit = Submit(request=a_request(num_tokens=4000), age_s=0.01)
    assert len(msgspec.msgpack.encode(Submitted.of(submit))) <= 150


def test_first_chunk_is_a_checkpoint_and_the_memory_is_bounded() -> None:
    c = cluster("p0", "d0", policy="cost")
    recording = Recording(60.0, 2**18)
    c.router.record(recording)
    for number in range(2000):
        submit(c, f"r{number}")
        c.clock.advance(0.25)
        c.router.tick()
        assert recording.num_bytes <= 2**18
    chunks = recording.chunks()
    assert isinstance(decode_chunk(chunks[0]), RouterCheckpoint)
    assert sum(map(len, chunks)) == recording.num_bytes


def test_state_that_is_too_large_ends_the_recording(caplog: pytest.LogCaptureFixture) -> None:
    c = cluster("p0", "d0", policy="cost")
    recording = Recording(60.0, 2**10)
    c.router.record(recording)
    submit(c)
    c.router.tick()
    assert recording.chunks() == [] and "raise router.recording_memory_bytes" in caplog.text
    assert recording.part(RecordingQuery()).number == 0


def test_operator_gets_a_chunk_in_parts() -> None:
    c, recording = recorded()
    submit(c)
    c.router.tick()
    chunks, part = [], recording.part(RecordingQuery())
    while part.number:
        chunks.append(part.body)
        assert part.num_bytes == len(part.body)
        rest = recording.part(RecordingQuery(number=part.number, first=7))
        assert rest.body == part.body[7:]
        part = recording.part(RecordingQuery(number=part.next_number or 10**6))
    assert chunks == recording.chunks()


def test_last_seconds_begin_at_the_checkpoint_before_them() -> None:
    c, recording = recorded()
    for _ in range(4 * 70):
        c.clock.advance(0.25)
        c.router.tick()
    for last_s in (5.0, 25.0, 45.0):
        checkpoint = decode_chunk(recording.part(RecordingQuery(last_s=last_s)).body)
        assert isinstance(checkpoint, RouterCheckpoint)
        assert c.clock.now_s() - 20.5 - last_s <= checkpoint.at_s <= c.clock.now_s() - last_s


def objects_of(root: object, known: dict[int, object]) -> dict[int, object]:
    """All objects of the router's own classes that a router consists of."""
    if type(root).__module__.startswith(("baton.router", "baton.fair_queue")) and id(root) not in known:
        known[id(root)] = root
        for part in attributes_of(root).values():
            objects_of(part, known)
    elif isinstance(root, dict):
        for part in [*root.keys(), *root.values()]:
            objects_of(part, known)
    elif isinstance(root, list | tuple | set):
        for part in root:
            objects_of(part, known)
    return known


def test_no_attribute_is_missed() -> None:
    c, _ = recorded()
    submit(c)
    found = objects_of(c.router, {})
    assert len(found) > 40
    for each in found.values():
        if hasattr(each, "__dict__"):
            assert vars(each).keys() == attributes_of(each).keys(), type(each)


def test_shared_objects_are_shared_again() -> None:
    c, _ = recorded()
    shared = [1.5, 2**80, float("inf")]
    state = {"one": shared, "other": {"again": shared}, "clock": c.clock}
    loaded = load(save(state, {"clock": c.clock}), {"clock": "another"})
    assert loaded["one"] == shared and loaded["one"] is loaded["other"]["again"]
    assert loaded["clock"] == "another"


@pytest.mark.parametrize(
    "state",
    [
        ["named_tuple", "os:system", ["true"]],
        ["object", ["subprocess:Popen", {}]],
        ["named_tuple", "baton.router.decisions:os.open", ["/etc/passwd", 0]],
        ["named_tuple", "baton.router.decisions:encode_line", [1]],
        ["enum", "baton.router.router:Router", 1],
        ["named", "baton.router.recording:platform.node"],
        ["named", "baton.router.policies.registry:policy_class"],
        ["object", ["baton.router.membership:Membership", ["dict", "dict", None, ["find", 1]]]],
        ["object", ["baton.router.router:Router", ["dict", "dict", None, ["received", 1]]]],
        ["nonsense"],
    ],
)
def test_state_that_names_other_code_is_refused(state: list[object]) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(msgspec.msgpack.encode(state), {})


@pytest.mark.parametrize("num_tokens", [-1, 2**33])
def test_recorded_request_has_no_more_tokens_than_a_submit_can_carry(num_tokens: int) -> None:
    request = {"request_id": id_of("r"), "token_ids": [b""]}
    fields = {"kind": "Submitted", "request": request, "num_prompt_tokens": 3}
    assert msgspec.convert(fields, Submitted).num_generated_tokens == 0
    for name in ("num_prompt_tokens", "num_generated_tokens"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**fields, name: num_tokens}, Submitted)


def test_router_without_a_recording_says_so() -> None:
    c = cluster("p0", "d0")
    assert isinstance(c.router, Router) and c.router.recording is None
