"""Traces in the formats of Mooncake and Azure."""

from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.sim.timed.workload import read_trace

MOONCAKE = """\
{"timestamp": 3000, "input_length": 700, "output_length": 40, "hash_ids": [0, 7]}
{"timestamp": 0, "input_length": 1024, "output_length": 64, "hash_ids": [0, 1]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.4799600,3180,8
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_mooncake_lines_come_in_order_of_arrival(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, "trace.jsonl", MOONCAKE))
    assert (first.arrival_s, first.input_tokens, first.output_tokens) == (0.0, 1024, 64)
    assert (second.arrival_s, second.block_ids, second.block_tokens) == (3.0, (0, 7), 512)


def test_azure_times_count_from_the_first_row(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, "trace.csv", AZURE))
    assert (first.arrival_s, first.input_tokens, first.block_ids) == (0.0, 4808, ())
    assert second.arrival_s == pytest.approx(0.5)


def test_scale_divides_lengths_and_blocks(tmp_path: Path) -> None:
    (first,) = read_trace(written(tmp_path, "trace.jsonl", MOONCAKE), scale=32, limit=1)
    assert (first.input_tokens, first.output_tokens, first.block_tokens) == (32, 2, 16)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace.jsonl", '{"timestamp": 0}\n', "line 1.*input_length"),
        ("trace.jsonl", MOONCAKE + "nonsense\n", "line 3"),
        ("trace.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,5\n", "line 2.*GeneratedTokens"),
        ("trace.csv", AZURE + "yesterday,1,1\n", "line 4"),
    ],
)
def test_a_line_of_another_format_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(written(tmp_path, name, text))


def test_missing_file_and_bad_scale_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="scale"):
        read_trace(written(tmp_path, "trace.csv", AZURE), scale=0)
