import json
import logging
import os
import subprocess
import sys

import msgspec
import pytest

from baton.cluster.logs import TEXT, JsonLines, TextLines, say
from baton.cluster.runtimes.base import Assignment, ProcessSpec, assignment, generations_of
from baton.config.environment import LOG_FORMATS, LogFormat, log_format
from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.messages.bounds import Kind


def test_json_line_has_message_logger_and_attached_fields() -> None:
    record = logging.LogRecord(
        "baton.router.router", logging.WARNING, "", 0, "%s is gone\nreally", ("d0",), None
    )
    record.worker = "ab" * 16
    line = JsonLines("router-0").format(record)
    read = json.loads(line)
    assert "\n" not in line
    assert (read["level"], read["process"], read["logger"]) == ("WARNING", "router-0", "baton.router.router")
    assert (read["message"], read["worker"]) == ("d0 is gone\nreally", "ab" * 16)
    assert read["time"].endswith("Z") and read.keys() == {
        *("time", "level", "process", "pid", "logger", "message", "worker")
    }


def test_text_of_another_process_stays_on_its_line() -> None:
    record = logging.LogRecord("l", logging.ERROR, "", 0, "failed: %s", ("a\nERROR b \x1b[2J\x9b",), None)
    assert TextLines(TEXT).format(record) == "ERROR l failed: a\\nERROR b \\x1b[2J\\x9b"


def test_json_line_of_an_exception_holds_its_traceback() -> None:
    try:
        raise ValueError("x")
    except ValueError:
        record = logging.LogRecord("l", logging.ERROR, "", 0, "m", (), sys.exc_info())
    assert "ValueError: x" in json.loads(JsonLines("p").format(record))["exception"]


def test_messages_of_serve_are_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say("starting")
    monkeypatch.setenv("BATON_LOG_FORMAT", "json")
    say("draining")
    text, line = capsys.readouterr().err.splitlines()
    assert text == "baton: starting"
    assert (json.loads(line)["message"], json.loads(line)["process"]) == ("draining", "serve")


def test_unknown_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="BATON_LOG_FORMAT: expected text or json, got 'xml'"):
        log_format()


@pytest.mark.parametrize(
    ("log_format", "variables"),
    [(None, {"BATON_LOG_FORMAT": "json"}), ("json", {"BATON_LOG_FORMAT": "text"})],
)
def test_process_logs_in_json_and_shows_its_name(
    log_format: LogFormat | None, variables: dict[str, str]
) -> None:
    router = Assignment(
        kind=Kind.ROUTER,
        name="router-7",
        generations=generations_of(Kind.ROUTER, bytes(16)),
        config=msgspec.Raw(b'{"redis":"none"}'),
        log_format=log_format,
    )
    given = msgspec.json.encode(router) + b"\n"
    environment = os.environ | variables | {"BATON_LOG_LEVEL": "INFO"}
    command = [sys.executable, "-m", "baton.cluster.process"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(given)
        process.stdin.flush()
        assert b"Started" in process.stdout.readline()
        with open(f"/proc/{process.pid}/cmdline", "rb") as file:
            assert file.read().strip(b"\0") == b"baton router-7"
        process.terminate()
        said = process.communicate(timeout=60)[1]
    assert any(json.loads(line)["process"] == "router-7" for line in said.splitlines())


def test_processes_are_told_the_format_of_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ProcessSpec(kind=Kind.ROUTER, name="router-0", config=RouterConfig())
    for name in LOG_FORMATS:
        monkeypatch.setenv("BATON_LOG_FORMAT", name)
        assert msgspec.json.decode(assignment(spec, bytes(16)), type=Assignment).log_format == name
