"""The command as users run it: exit status, stdout and stderr."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from baton.cluster.cli.commands.bench import SUITES
from baton.cluster.cli.main import main
from tests.unit.cluster.conftest import Baton
from tests.unit.cluster.model_directories import with_config_alone

ROOT: Final = Path(__file__).resolve().parents[4]
COPY: Final = "copy(sun moon star)="
GENERATE: Final = ("generate", "tiny", COPY, "--temperature", "0", "--kv-cache-memory", "64MiB")
ENDLESS: Final = (*GENERATE, "--quiet", "--ignore-eos", "--max-tokens", "4000")


def start(*arguments: str, python: Sequence[str] = ("-m", "baton")) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *python, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_stdout_has_the_text_alone(baton: Baton) -> None:
    status, out, err = baton(*GENERATE)
    assert (status, out) == (0, "sun moon star\n")
    pages = r"[\d,]+ tokens in [\d,]+ pages of 16 \(0\.06 GiB a rank\), [\d,]+ host pages"
    assert re.fullmatch(f"KV cache: {pages}\n", err)


def test_interrupt_ends_with_status_130() -> None:
    process = start(*ENDLESS)
    assert process.stdout is not None
    assert process.stdout.read(10) == "sun moon s"  # tokens come while it still generates
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err) == (130, "")


def test_broken_pipe_ends_silently_with_status_141() -> None:
    process = start(*ENDLESS)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(3) == "sun"
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), err) == (141, "")


FULL: Final = "baton: error: standard output cannot be written: No space left on device\n"


def test_unwritable_output_is_one_line_and_status_2() -> None:
    command = shlex.join([sys.executable, "-m", "baton", "--version"])
    result = subprocess.run(
        ["sh", "-c", f"{command} >/dev/full"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (result.returncode, result.stderr) == (2, FULL)


@pytest.mark.parametrize("arguments", [[*GENERATE, "--quiet", "--json"], ["--version"]])
def test_each_writer_tells_of_unwritable_output(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, baton: Baton
) -> None:
    with suppress(OSError), Path("/dev/full").open("w") as full:  # which has text to write when it is closed
        monkeypatch.setattr(sys, "stdout", full)
        result = baton(*arguments)
    assert result == (2, "", FULL)


def test_closed_output_is_one_line_and_status_2(monkeypatch: pytest.MonkeyPatch, baton: Baton) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    closed = "baton: error: standard output is closed: there is nowhere to write the answer\n"
    assert baton(*GENERATE, "--quiet") == (2, "", closed)


def test_setting_that_a_cpu_ignores_is_warned_of(baton: Baton) -> None:
    command = [*GENERATE, "--device", "cpu", "--gpu-memory-utilization", "0.5"]
    status, out, err = baton(*command)
    assert (status, out) == (0, "sun moon star\n")
    assert err.startswith("baton: warning: --gpu-memory-utilization is ignored on a CPU\n")
    assert baton(*command, "--quiet") == (0, "sun moon star\n", "")


def test_character_that_the_terminal_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    garbage = ("--max-tokens", "60", "--temperature", "5", "--seed", "1", "--ignore-eos")
    assert main([*GENERATE, *garbage, "--quiet"]) == 0
    sys.stdout.flush()
    assert b"?" in terminal.getvalue()


WITHOUT_TORCH: Final = (
    "import sys; sys.modules['torch'] = None; from baton.cluster.cli.main import main; sys.exit(main())"
)


@pytest.mark.parametrize("command", ["serve", "generate", "calibrate", "rehearse", "advise", "sim"])
def test_help_does_not_wait_for_torch(command: str) -> None:
    process = start(command, "--help", python=("-c", WITHOUT_TORCH))
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "") and f"usage: baton {command}" in out


def test_missing_torch_is_answered_with_the_install_command() -> None:
    process = start(*GENERATE, python=("-c", WITHOUT_TORCH))
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err == "baton: error: torch is not installed: pip install '.[worker]', in Baton's checkout\n"


def test_verbose_shows_loading_and_the_cache(baton: Baton) -> None:
    status, out, err = baton(*GENERATE, "-v")
    assert (status, out) == (0, "sun moon star\n")
    assert "Loading weights" in err and "MB/s" in err
    assert "KV cache: " in err


def test_json_has_everything(baton: Baton) -> None:
    status, out, _ = baton(*GENERATE, "--json", "--logprobs", "1", "--stop", "star")
    completion = json.loads(out)
    (answer,) = completion["outputs"]
    assert (status, completion["prompt"]) == (0, COPY)
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == ("sun moon ", "stop", "star")
    assert len(answer["logprobs"]) == len(answer["token_ids"])


@pytest.mark.parametrize("prompt", [[COPY], ["--", "-1+2="]])
def test_prompt_may_come_last(prompt: list[str], baton: Baton) -> None:
    status, out, _ = baton("generate", "tiny", "--temperature", "0", "--json", *prompt)
    assert (status, json.loads(out)["prompt"]) == (0, prompt[-1])


def test_chat_answers_a_question(baton: Baton) -> None:
    command = ["generate", "tiny", "What is Baton?", "--chat", "--temperature", "0"]
    status, out, _ = baton(*command)
    assert status == 0
    assert "prefill and decode" in out


@pytest.mark.parametrize("content", [COPY, f"{COPY}\n"])
def test_prompt_may_come_from_a_file(tmp_path: Path, baton: Baton, content: str) -> None:
    (tmp_path / "prompt.txt").write_text(content)
    options = ["--prompt-file", str(tmp_path / "prompt.txt"), "--temperature", "0", "--json"]
    _, out, _ = baton("generate", "tiny", *options)
    assert json.loads(out)["prompt"] == COPY


@pytest.mark.parametrize("n", [1, 2])
def test_model_without_tokenizer_answers_with_token_ids(tmp_path: Path, baton: Baton, n: int) -> None:
    command = ["generate", str(with_config_alone(tmp_path)), "--load-format", "dummy", "--token-ids", "1,2,3"]
    command += ["--max-tokens", "4", "--ignore-eos", "--n", str(n)]
    status, out, _ = baton(*command)
    answers = out.strip().split("\n\n")
    assert (status, [len(answer.split()) for answer in answers]) == (0, [4] * n)
    assert all(token_id.isdecimal() for token_id in out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--json the sun", "unexpected argument 'sun': put a text of several words in quotes"),
        ("", "expected one prompt"),
        ("sun --prompt-file x", "expected one prompt"),
        ("--token-ids 1 --chat", "--chat: the user's message is text"),
        ("--token-ids=-1", "token id -1: expected an integer from 0"),
        ("--prompt-file /nowhere", "/nowhere cannot be read"),
        ("sun --temperature nan", "temperature must be at least 0.0, got nan"),
        ("sun --max-tokens 0", "error: --max-tokens must be at least 1, got 0"),
        ("sun --top-k 5000", "error: --top-k must be at most the vocabulary"),
        ("sun --kv-cache-memory 1KiB", "got 1,024: raise --kv-cache-memory or"),
        ("sun --kv-cache-memory-bytes 1", "got 1: raise --kv-cache-memory-bytes or"),
        ("sun --kv-cache-memory 0", "-memory: expected int, at least 1 | None, got 0"),
        ("sun --kv-cache-memory 9999TiB", "bytes cannot be allocated"),
        ("sun --max-model-len 9999", "positions for 4096 tokens, got 9999"),
        (f"'{'sun ' * 20}' --max-model-len 16", "tokens; the model takes 16"),
        ("sun --logprobs 1", "add --json"),
        ("sun --prompt-logprobs 1", "add --json"),
        ("sun --logit-bias 5000:1", "--logit-bias: token id 5000 is outside"),
        ("sun --stop-token-ids 5000", "--stop-token-ids: token id 5000 is outside"),
        ("sun --quiet -v", "not allowed with argument"),
        ("''", "the prompt is empty"),
    ],
)
def test_error_is_one_line_and_status_2(options: str, message: str, baton: Baton) -> None:
    status, out, err = baton("generate", "tiny", *shlex.split(options))
    assert (status, out) == (2, "")
    *before, error = err.splitlines()
    assert error.startswith("baton: error: ") and message in error
    assert all(line.startswith("KV cache: ") for line in before)  # printed when the model is loaded


def test_serve_refuses_a_missing_model_before_it_starts_anything(baton: Baton) -> None:
    status, out, err = baton("serve", "/nowhere", "--runtime", "local")
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("baton: error: model ")


def test_unknown_command_is_refused(baton: Baton) -> None:
    assert "invalid choice: 'genrate'" in baton("genrate", "tiny", "sun").err
    assert "COMMAND" in baton().err


def test_a_bad_log_level_is_a_user_error(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_LOG_LEVEL", "loud")
    status, _, err = baton(*GENERATE)
    assert (status, err.count("BATON_LOG_LEVEL")) == (2, 1)


def test_a_bench_has_its_own_options(baton: Baton) -> None:
    status, output, _ = baton("bench", "kv", "--help")
    assert status == 0
    assert "--stream-tokens" in output and "--rival" in output
    status, _, errors = baton("bench", "kv", "--shapes", "enormous")
    assert status == 2
    assert "invalid choice: 'enormous'" in errors and errors.count("\n") == 1


def test_an_unknown_bench_is_named(baton: Baton) -> None:
    for arguments, got in ((["speed"], "'speed'"), ([], "none")):
        status, _, errors = baton("bench", *arguments)
        told = f"baton: error: baton bench SUITE: expected {', '.join(SUITES)}, got {got}\n"
        assert (status, errors) == (2, told)
    status, out, _ = baton("bench", "--help")
    assert status == 0 and "baton bench kv" in out and "baton bench serve" in out
