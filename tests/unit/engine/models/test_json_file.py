from pathlib import Path

import pytest

from baton.engine.models.checkpoint import MAX_FILE_BYTES, JsonObject, read_json
from baton.errors import ModelError

KEYS = JsonObject(
    {"one": 1, "half": 0.5, "none": None, "yes": True, "inner": {"a": 2}, "ids": [3, 4]}, "f.json"
)


def test_null_counts_as_absent_and_is_distinguishable() -> None:
    assert "none" not in KEYS and "absent" not in KEYS
    assert KEYS.get("none", int) is None
    assert KEYS.is_null("none") and not KEYS.is_null("absent") and not KEYS.is_null("one")
    with pytest.raises(ModelError, match="f.json: key 'none' is missing"):
        KEYS.require("none", int)


def test_values_have_the_requested_type() -> None:
    assert KEYS.get("one", float) == 1.0
    assert KEYS.require("ids", list[int]) == [3, 4]
    with pytest.raises(ModelError, match="f.json: 'half' should be int, got 0.5"):
        KEYS.get("half", int)
    with pytest.raises(ModelError, match="f.json: 'yes' should be int, got True"):
        KEYS.get("yes", int)
    with pytest.raises(ModelError, match=r"f.json: 'ids' should be list\[str\], got \[3, 4\]"):
        KEYS.get("ids", list[str])


def test_counts_have_bounds() -> None:
    assert KEYS.count("one") == 1
    assert KEYS.count("absent", 7) == 7
    with pytest.raises(ModelError, match="'one' should be 1 to 0, got 1"):
        KEYS.count("one", most=0)
    with pytest.raises(ModelError, match="key 'absent' is missing"):
        KEYS.count("absent")


def test_integers_reads_one_number_or_a_list() -> None:
    assert KEYS.integers("one") == (1,)
    assert KEYS.integers("ids") == (3, 4)
    assert KEYS.integers("none") == ()


def test_sections_name_where_they_stand() -> None:
    assert KEYS.section("inner").count("a") == 2
    with pytest.raises(ModelError, match="f.json: inner: key 'b' is missing"):
        KEYS.section("inner").count("b")
    assert "b" not in KEYS.section("absent")


def test_merging_prefers_present_keys() -> None:
    merged = JsonObject({"one": 10, "half": None}, "g.json").merged(KEYS)
    assert merged.count("one") == 10
    assert merged.positive("half") == 0.5
    assert merged.source == "g.json"


@pytest.mark.parametrize("text", ["{", "[1]", "", '{"a": NaN}', '{"a": 1} x', '{"a":' + "[" * 200_000])
def test_damaged_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(ModelError, match="f.json: is not a JSON object"):
        read_json(tmp_path / "f.json")


def test_absent_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="f.json: there is no such file"):
        read_json(tmp_path / "f.json")
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        read_json(tmp_path)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "f.json").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ModelError, match=f"at most {MAX_FILE_BYTES} bytes"):
        read_json(tmp_path / "f.json")
