"""The decision log of a router, damaged logs, and logs that cannot be written."""

import asyncio
import base64
import json
import os
import resource
import stat
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.messages.control import Decision, Ended, Measured, Started, Weighed
from baton.messages.workers import PrefillTimes
from baton.request import Request, TokenIds
from baton.router.decisions import (
    MAX_DECISIONS,
    DecisionHistory,
    DecisionLog,
    DispatchedLine,
    EndedLine,
    decode_lines,
    keys_in,
)
from baton.router.router import serve_router
from tests.node_peers import a_request, id_of
from tests.unit.router.router_cluster import Cluster, cluster

KEY = (id_of("a"), 0)


def logged() -> tuple[Cluster, list[bytes]]:
    c, lines = cluster("p0", "d0", policy="cost"), list[bytes]()
    c.router.log_to(lines.append)
    c.submit(a_request("a", 40))
    return c, lines


def test_attempt_has_a_line_at_its_dispatch_and_a_line_at_its_end() -> None:
    c, lines = logged()
    c.clock.advance(0.5)
    c["g"].say(Started(attempts=(KEY,)))
    times = PrefillTimes(id_of("a"), 0, 0.1, 0.3, 40, 40)
    c["d0"].say(Measured(prefills=(times,)))
    c.clock.advance(1.0)
    c["g"].say(Ended(attempts=(KEY,)))
    sent, ended = decode_lines(lines, "log")
    assert isinstance(sent, DispatchedLine) and isinstance(ended, EndedLine)
    assert (sent.decision.request_id, sent.page_size, sent.num_output_tokens) == (id_of("a"), 16, 8)
    assert sent.decision.chosen in sent.decision.weighed and len(keys_in(sent)) == 2
    assert (ended.first_token_s, ended.measured, ended.at_s - sent.at_s) == (0.5, times, 1.5)


def test_line_has_only_the_length_and_page_keys_of_a_prompt() -> None:
    secret, salt = 123_456_789, b"\xa7" * 16
    c, lines = cluster("p0", "d0", policy="cost"), list[bytes]()
    c.router.log_to(lines.append)
    c.submit(
        Request(request_id=id_of("a"), token_ids=TokenIds.of((secret,) * 40), tenant="acme", cache_salt=salt)
    )
    (line,) = map(json.loads, lines)
    assert set(line) == {"kind", "at_s", "decision", "page_size", "num_output_tokens", "keys"}
    assert line["decision"]["num_tokens"] == 40
    for what in (str(secret), "acme", base64.b64encode(salt).decode()[:20], salt.hex()):
        assert what not in lines[0].decode()


@pytest.mark.parametrize(
    "damage",
    [b"{}", b"\xff\xfe", b"[1, 2]", b'{"kind": "DispatchedLine"}', b'{"kind": "EndedLine", "at_s": -1}', b""],
)
def test_damaged_line_is_named(damage: bytes) -> None:
    _, lines = logged()
    with pytest.raises(ConfigError, match="log, line 2"):
        list(decode_lines([lines[0], damage, lines[0]], "log"))
    assert len(list(decode_lines([lines[0], damage], "log"))) == 1, "the last may have been cut off"


def test_malformed_keys_are_refused() -> None:
    _, lines = logged()
    (sent,) = decode_lines(lines, "log")
    assert isinstance(sent, DispatchedLine)
    with pytest.raises(ConfigError, match=id_of("a")):
        keys_in(DispatchedLine(at_s=0, decision=sent.decision, page_size=16, num_output_tokens=1, keys="?"))


def test_existing_file_is_appended_to(tmp_path: Path) -> None:
    for line in (b"one\n", b"two\n"):
        log = DecisionLog(tmp_path / "log")
        log.write(line)
        log.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_new_file_is_readable_by_this_user_only(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        DecisionLog(tmp_path / "log").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_line_cut_off_by_a_full_disk_costs_no_other_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, (line,) = logged()
    path, limits = tmp_path / "log", resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in range(2):
        log = DecisionLog(path)
        log.write(line)
        if number == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(line) + len(line) // 2, limits[1]))
        try:
            log.write(line)  # the first time, half of it
            log.write(line)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.close()
    written = path.read_bytes().splitlines(keepends=True)
    assert [each == line for each in written] == [True, False, True, True, True]
    caplog.clear()
    assert len(list(decode_lines(written, "log"))) == 4
    assert [record.line for record in caplog.records] == [2]  # type: ignore[attr-defined]


def test_full_disk_ends_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    log = DecisionLog(Path("/dev/full"))
    for _ in range(3):
        log.write(b"line\n")
    log.close()
    assert [record.message for record in caplog.records] == ["the decision log ends here"]


def test_router_whose_log_cannot_be_written_does_not_start(tmp_path: Path) -> None:
    async def serve(path: Path) -> None:
        config = RouterConfig(decision_log=str(path), redis="none")
        stopping = asyncio.Event()
        await serve_router(config, b"k" * 32, lambda address: stopping.set(), stopping)

    asyncio.run(serve(tmp_path / "log"))
    assert (tmp_path / "log").exists()
    with pytest.raises(ConfigError, match="decision_log"):
        asyncio.run(serve(tmp_path / "no folder" / "log"))


def test_line_cut_off_at_any_byte_costs_no_other_line() -> None:
    _, (line,) = logged()
    for cut in range(1, len(line) - 1):
        assert list(decode_lines([line[:cut] + b"\n", line], "log")) == list(decode_lines([line], "log")), cut


def a_decision(name: str, attempt: int = 0) -> Decision:
    return Decision(
        request_id=id_of(name),
        attempt=attempt,
        age_s=0.0,
        reason="cost",
        num_tokens=1,
        chosen=Weighed(decode=id_of("d")),
    )


def test_last_decisions_are_kept() -> None:
    decisions = DecisionHistory(ManualClock())
    for number in range(MAX_DECISIONS + 3):
        decisions.add(a_decision(str(number)))
    assert len(decisions) == MAX_DECISIONS
    assert list(decisions.of(id_of("2"))) == []
    assert [each.request_id for each in decisions.of(id_of("3"))] == [id_of("3")]


def test_decisions_of_a_request_have_their_ages() -> None:
    clock = ManualClock()
    decisions = DecisionHistory(clock)
    decisions.add(a_decision("r", 0))
    clock.advance(2.0)
    decisions.add(a_decision("r", 1))
    clock.advance(1.0)
    assert [(each.attempt, each.age_s) for each in decisions.of(id_of("r"))] == [(0, 3.0), (1, 1.0)]


def test_only_the_first_report_of_a_first_token_counts() -> None:
    clock = ManualClock()
    decisions = DecisionHistory(clock)
    decisions.add(a_decision("r"))
    for _ in range(2):
        clock.advance(0.25)
        decisions.started((id_of("r"), 0))
    decisions.started((id_of("unknown"), 0))
    assert next(decisions.of(id_of("r"))).first_token_s == 0.25
