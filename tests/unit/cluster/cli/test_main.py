"""The command as users run it: exit status, stdout and stderr."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from baton.cluster.cli.main import main
from tests.unit.cluster.model_directories import with_config_alone, with_pickled_weights, without_weights

ROOT: Final = Path(__file__).resolve().parents[4]
COPY: Final = "copy(sun moon star)="
GENERATE: Final = ("generate", "tiny", COPY, "--temperature", "0", "--kv-cache-memory", "64MiB")
ENDLESS: Final = (*GENERATE, "--quiet", "--ignore-eos", "--max-tokens", "4000")


def start(
    *arguments: str, python: Sequence[str] = ("-m", "baton"), **environment: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *python, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )


def run_here(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """In this process, which has torch imported already."""
    try:
        status = main(arguments)
    except SystemExit as exit_:  # how argparse ends
        status = int(exit_.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_stdout_has_the_text_alone() -> None:
    process = start(*GENERATE)
    out, err = process.communicate()
    assert (process.returncode, out) == (0, "sun moon star\n")
    assert re.fullmatch(r"KV cache: [\d,]+ tokens in [\d,]+ pages of 16 \(0\.06 GiB a rank\)\n", err)


def test_quiet_says_nothing_but_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here([*GENERATE, "--quiet"], capsys) == (0, "sun moon star\n", "")


def test_a_user_error_is_one_line_and_status_2() -> None:
    process = start("generate", "nonsense", "Hello")
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err.startswith("baton: error: model 'nonsense': expected \"tiny\"")
    assert err.count("\n") == 1


def test_an_interrupt_ends_it_with_status_130() -> None:
    process = start(*ENDLESS)
    assert process.stdout is not None
    assert process.stdout.read(10) == "sun moon s"  # tokens come while it still generates
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err) == (130, "")


def test_a_reader_that_goes_away_is_no_error_worth_a_word() -> None:
    process = start(*ENDLESS)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(3) == "sun"
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), err) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "redirection", "message"),
    [
        (GENERATE, ">/dev/full", "standard output cannot be written: No space left on device"),
        ([*GENERATE, "--json"], ">/dev/full", "standard output cannot be written: No space left on device"),
        (["--version"], ">/dev/full", "standard output cannot be written: No space left on device"),
        (GENERATE, ">&-", "standard output is closed: there is nowhere to write the answer"),
    ],
)
def test_an_output_that_takes_nothing_is_told_in_one_line(
    arguments: Sequence[str], redirection: str, message: str
) -> None:
    quiet = ["--quiet"] if "generate" in arguments else []
    command = shlex.join([sys.executable, "-m", "baton", *arguments, *quiet])
    result = subprocess.run(
        ["sh", "-c", f"{command} {redirection}"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (result.returncode, result.stderr) == (2, f"baton: error: {message}\n")


def test_a_setting_that_a_cpu_ignores_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*GENERATE, "--device", "cpu", "--gpu-memory-utilization", "0.5"]
    status, out, err = run_here(command, capsys)
    assert (status, out) == (0, "sun moon star\n")
    assert err.startswith("baton: warning: --gpu-memory-utilization is ignored on a CPU\n")
    assert run_here([*command, "--quiet"], capsys) == (0, "sun moon star\n", "")


def test_a_terminal_that_lacks_a_character_shows_another() -> None:
    garbage = ("--max-tokens", "60", "--temperature", "5", "--seed", "1", "--ignore-eos")
    process = start(*GENERATE, *garbage, "--quiet", PYTHONIOENCODING="ascii")
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "?" in out and out.isascii()


def test_without_torch_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from baton.cluster.cli.main import main; sys.exit(main())"
    )
    process = start(*GENERATE, python=("-c", program))
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err == "baton: error: torch is not installed: pip install '.[worker]', in Baton's checkout\n"


def test_verbose_shows_loading_and_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_here([*GENERATE, "-v"], capsys)
    assert (status, out) == (0, "sun moon star\n")
    assert "Loading weights" in err and "B/s" in err
    assert "KV cache: " in err


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_here([*GENERATE, "--json", "--logprobs", "1", "--stop", "star"], capsys)
    completion = json.loads(out)
    (answer,) = completion["outputs"]
    assert (status, completion["prompt"]) == (0, COPY)
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == ("sun moon ", "stop", "star")
    assert len(answer["logprobs"]) == len(answer["token_ids"])


@pytest.mark.parametrize("prompt", [[COPY], ["--", "-1+2="]])
def test_the_prompt_may_come_last(prompt: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_here(["generate", "tiny", "--temperature", "0", "--json", *prompt], capsys)
    assert (status, json.loads(out)["prompt"]) == (0, prompt[-1])


def test_several_answers_come_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run_here([*GENERATE, "--n", "2"], capsys)
    assert out == "sun moon star\n\nsun moon star\n"


def test_chat_answers_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "tiny", "What is Baton?", "--chat", "--temperature", "0"]
    status, out, _ = run_here(command, capsys)
    assert status == 0
    assert "prefill and decode" in out


@pytest.mark.parametrize("content", [COPY, f"{COPY}\n"])
def test_the_prompt_may_come_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "prompt.txt").write_text(content)
    options = ["--prompt-file", str(tmp_path / "prompt.txt"), "--temperature", "0", "--json"]
    _, out, _ = run_here(["generate", "tiny", *options], capsys)
    assert json.loads(out)["prompt"] == COPY


def test_a_seed_repeats_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "tiny", "sun", "--temperature", "2", "--seed", "7", "--max-tokens", "12"]
    assert run_here(command, capsys) == run_here(command, capsys)


def test_random_weights_need_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(without_weights(tmp_path))
    status, _, _ = run_here(["generate", directory, "sun", "--load-format", "dummy"], capsys)
    assert status == 0


@pytest.mark.parametrize("n", [1, 2])
def test_a_config_alone_answers_token_ids_with_token_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], n: int
) -> None:
    command = ["generate", str(with_config_alone(tmp_path)), "--load-format", "dummy", "--token-ids", "1,2,3"]
    command += ["--max-tokens", "4", "--ignore-eos", "--n", str(n)]
    status, out, _ = run_here(command, capsys)
    answers = out.strip().split("\n\n")
    assert (status, [len(answer.split()) for answer in answers]) == (0, [4] * n)
    assert all(token_id.isdecimal() for token_id in out.split())


def test_token_ids_are_completed_like_the_text_they_stand_for(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run_here([*GENERATE, "--json"], capsys)
    token_ids = ",".join(map(str, json.loads(out)["prompt_token_ids"]))
    _, out, _ = run_here(["generate", "tiny", "--token-ids", token_ids, "--temperature", "0"], capsys)
    assert out == "sun moon star\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["sun"], "the model has no tokenizer.json: its prompts are token ids"),
        (["sun", "--chat"], "the model has no tokenizer.json: its prompts are token ids"),
        (["--token-ids", "1,2", "--stop", "x"], "stop: the model has no tokenizer"),
    ],
)
def test_text_needs_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    command = ["generate", str(with_config_alone(tmp_path)), "--load-format", "dummy", *options]
    status, out, err = run_here(command, capsys)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "tiny", "sun", "--max-tokns", "3"], "did you mean --max-tokens?"),
        (["generate", "tiny", "sun", "--max-tokens", "three"], "--max-tokens: invalid int value: 'three'"),
        (["generate", "tiny", "--json", "the", "sun"], "unexpected argument 'sun': put a prompt"),
        (["generate", "tiny", "the", "sun"], "unexpected argument 'sun': put a prompt of several words in"),
        (["generate", "tiny", "-1+2="], "put -- before a prompt that starts with a dash"),
        (["generate", "tiny"], "expected one prompt"),
        (["generate", "tiny", "sun", "--prompt-file", "x"], "expected one prompt"),
        (["generate", "tiny", "sun", "--token-ids", "1"], "expected one prompt"),
        (["generate", "tiny", "--token-ids", "1", "--chat"], "--chat: what the user says is text"),
        (["generate", "tiny", "--token-ids=-1"], "token id -1 is outside the vocabulary"),
        (["generate", "tiny", "--prompt-file", "/nowhere"], "/nowhere cannot be read"),
        (["generate", "tiny", "sun", "--temperature", "nan"], "temperature must be at least 0.0, got nan"),
        (["generate", "tiny", "sun", "--max-tokens", "0"], "error: --max-tokens must be at least 1, got 0"),
        (["generate", "tiny", "sun", "--top-k", "5000"], "error: --top-k must be at most the vocabulary"),
        (["generate", "tiny", "sun", "--dtype", "int3"], "dtype: expected one of 'auto', 'float32'"),
        (["generate", "tiny", "sun", "--kv-cache-memory", "4GIB"], "expected a size such as"),
        (["generate", "tiny", "sun", "--kv-cache-memory", "1KiB"], "got 1,024: raise --kv-cache-memory or"),
        (
            ["generate", "tiny", "sun", "--kv-cache-memory-bytes", "1"],
            "got 1: raise --kv-cache-memory-bytes or",
        ),
        (
            ["generate", "tiny", "sun", "--page-size", "17"],
            "error: --page-size: expected a power of two, got 17",
        ),
        (["generate", "tiny", "sun", "--kv-cache-memory", "0"], "-memory: expected at least 1, got 0"),
        (["generate", "tiny", "sun", "--kv-cache-memory", "-5"], "expected a size such as"),
        (["generate", "tiny", "sun", "--kv-cache-memory", "9999TiB"], "bytes cannot be had"),
        (["generate", "tiny", "sun", "--temperature", "inf"], "temperature must be"),
        (["generate", "tiny", "sun", "--max-num-seqs", f"{10**12}"], "--max-num-seqs: expected 1 to 65536"),
        (["generate", "tiny", "sun", "--max-num-batched-tokens", f"{10**12}"], "expected 1 to 1048576"),
        (["generate", "tiny", "sun", "--max-model-len", "1"], "--max-model-len: expected at least 2, got 1"),
        (
            ["generate", "tiny", "sun", "--max-model-len", "1e12"],
            "--max-model-len: expected an integer such as",
        ),
        (["generate", "tiny", "sun", "--max-model-len", f"{10**12}"], "tokens, got 1000000000000"),
        (["generate", "tiny", "sun", "-tp", f"{2**62}"], "KV heads: 2 cannot be split over"),
        (["generate", "/dev/null", "sun"], "got a file"),
        (["generate", "/proc", "sun"], "/proc/config.json: there is no such file"),
        (["generate", "tiny", "sun", "--max-model-len", "9999"], "positions for 4096 tokens, got 9999"),
        (["generate", "tiny", "sun " * 20, "--max-model-len", "16"], "tokens; the model takes 16"),
        (["generate", "tiny", "sun", "--logprobs", "1"], "add --json"),
        (["generate", "tiny", "sun", "--prompt-logprobs", "1"], "add --json"),
        (["generate", "tiny", "sun", "--scheduler-policy", "x"], "--scheduler-policy: expected one of"),
        (["generate", "tiny", "sun", "--logit-bias", "5000:1"], "--logit-bias: token id 5000 is outside"),
        (
            ["generate", "tiny", "sun", "--stop-token-ids", "5000"],
            "--stop-token-ids: token id 5000 is outside",
        ),
        (["generate", "--model", "tiny", "sun"], "the model comes first and has no flag"),
        (["generate", "tiny", "sun", "--temp", "0"], "did you mean --temperature?"),
        (["generate", "tiny", "sun", "--quiet", "-v"], "not allowed with argument"),
        (["generate", "tiny", "sun", "--stop", ""], "a stop string must not be empty"),
        (["generate", "tiny", ""], "the prompt is empty"),
        (["genrate", "tiny", "sun"], "invalid choice: 'genrate'"),
        ([], "COMMAND"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run_here(arguments, capsys)
    assert (status, out) == (2, "")
    *before, error = err.splitlines()
    assert error.startswith("baton: error: ") and message in error
    assert all(line.startswith("KV cache: ") for line in before)  # said when the model is loaded


def test_pickled_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run_here(["generate", str(with_pickled_weights(tmp_path)), "sun"], capsys)
    assert status == 2
    assert "pytorch_model.bin" in err and "convert them to safetensors" in err


def test_a_bad_log_level_is_a_user_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_LOG_LEVEL", "loud")
    status, _, err = run_here(GENERATE, capsys)
    assert (status, err.count("BATON_LOG_LEVEL")) == (2, 1)


def test_version_and_help_need_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_here(["--version"], capsys)
    assert status == 0 and out.startswith("baton ")
    status, out, _ = run_here(["generate", "--help"], capsys)
    assert status == 0 and "--max-tokens N" in out


def test_a_bench_has_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = run_here(["bench", "kv", "--help"], capsys)
    assert status == 0
    assert "--trace" in output and "--faults" in output
    status, _, errors = run_here(["bench", "kv", "--shapes", "enormous"], capsys)
    assert status == 2
    assert "invalid choice: 'enormous'" in errors and errors.count("\n") == 1


def test_an_unknown_bench_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, got in ((["speed"], "'speed'"), ([], "none")):
        status, _, errors = run_here(["bench", *arguments], capsys)
        told = f"baton: error: baton bench SUITE: expected kv, prefix, serve, got {got}\n"
        assert (status, errors) == (2, told)
    status, out, _ = run_here(["bench", "--help"], capsys)
    assert status == 0 and "baton bench kv" in out and "baton bench serve" in out
