import io
import logging
from pathlib import Path

import pytest

from baton.config.environment import (
    cache_directory,
    environment_of_child,
    log_level,
    mps_variables,
    prepare_nccl,
    prepare_ray,
)
from baton.errors import ConfigError


def test_torch_leaves_a_process_whose_nccl_peer_is_gone_unless_the_operator_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    monkeypatch.setattr("os.environ", environment)
    prepare_nccl()
    assert environment == {"TORCH_NCCL_ENABLE_MONITORING": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_directory() == Path("/x/baton")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "baton"
    monkeypatch.setenv("BATON_CACHE_DIR", "/y")
    assert cache_directory() == Path("/y")


def test_ray_is_told_to_heed_its_token_and_to_keep_colours_out_of_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    own = {"RAY_AUTH_MODE": "disabled"}
    for stream, colours in ((io.StringIO(), "0"), (None, "0"), (Terminal(), None)):
        environment = dict(own)
        monkeypatch.setattr("os.environ", environment)
        monkeypatch.setattr("sys.stderr", stream)
        prepare_ray()
        monkeypatch.undo()
        assert environment["RAY_AUTH_MODE"] == "disabled"  # the operator's own goes first
        assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
        assert environment.get("RAY_COLOR_PREFIX") == colours
        assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_LOG_LEVEL", raising=False)
    assert log_level() == logging.WARNING
    monkeypatch.setenv("BATON_LOG_LEVEL", "debug")
    assert log_level() == logging.DEBUG
    monkeypatch.setenv("BATON_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="BATON_LOG_LEVEL: expected one of .*DEBUG.*, got 'loud'"):
        log_level()


@pytest.mark.parametrize(("of_operator", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_that_wait_sleep_unless_the_operator_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, of_operator: str | None, expected: str
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if of_operator is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", of_operator)
    assert environment_of_child(num_threads=1)["OMP_WAIT_POLICY"] == expected


@pytest.mark.parametrize(
    ("priority", "of_operator", "expected"),
    [(0, None, "0"), (1, None, "1"), (None, None, None), (1, "0", "0")],
)
def test_worker_has_its_priority_among_the_clients_of_mps(
    monkeypatch: pytest.MonkeyPatch, priority: int | None, of_operator: str | None, expected: str | None
) -> None:
    monkeypatch.delenv("CUDA_MPS_CLIENT_PRIORITY", raising=False)
    if of_operator is not None:
        monkeypatch.setenv("CUDA_MPS_CLIENT_PRIORITY", of_operator)
    assert mps_variables(priority).get("CUDA_MPS_CLIENT_PRIORITY") == expected
    environment = environment_of_child(num_threads=1, mps_priority=priority)
    assert environment.get("CUDA_MPS_CLIENT_PRIORITY") == expected
