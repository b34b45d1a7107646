"""YAML that people write: what is read, beyond what the files of tenants and of settings test."""

from baton.config.yaml_text import load_yaml


def test_key_that_overrides_a_merged_one_is_not_repeated_where_its_mapping_is_merged_again() -> None:
    text = "b: &b {a: 1}\nx: {d: &d {<<: *b, a: 2}}\no: {<<: *d}"
    assert load_yaml(text) == {"b": {"a": 1}, "x": {"d": {"a": 2}}, "o": {"a": 2}}
