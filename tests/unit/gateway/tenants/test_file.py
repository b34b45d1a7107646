import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.gateway.tenants.file import (
    TenantEntry,
    TenantsFile,
    parse_tenants,
    read_tenants,
    with_key,
    without_keys,
)
from baton.tenants import Degradation, Quotas, Sla

DIGEST = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64

WHOLE = f"""
classes: [interactive, batch]
public_prefixes:
  house: "You are a helpful assistant."
tenants:
  acme:
    keys: ["{DIGEST}"]
    weight: 2
    priority_class: interactive
    sla: {{ttft_ms: 500, tpot_ms: 50, deadline_ms: 30000}}
    quotas:
      tokens_per_s: 5000
      burst_tokens: 20000
      max_concurrent_requests: 64
      max_active_sequences: 32
      max_kv_pages: 4096
      max_queued: 100
    max_queue_delay_ms: 20
    degradation: {{clip_max_tokens_to: 256, may_reduce_logprobs: true, may_shed: false}}
    models: [tiny]
    public_prefixes: [house]
    admin: true
  zeta:
    keys: []
"""


def parse(text: str) -> TenantsFile:
    return parse_tenants(text, "tenants.yaml")


def entry(fields: str, *, top: str = "") -> TenantsFile:
    return parse(f"{top}\ntenants:\n  acme:\n    keys: ['{DIGEST}']\n    {fields}\n")


def test_every_field_is_read() -> None:
    file = parse(WHOLE)
    acme, zeta = file.tenants["acme"], file.tenants["zeta"]
    assert acme.sla == Sla(ttft_ms=500, tpot_ms=50, deadline_ms=30_000)
    assert acme.quotas == Quotas(
        tokens_per_s=5000,
        burst_tokens=20_000,
        max_concurrent_requests=64,
        max_active_sequences=32,
        max_kv_pages=4096,
        max_queued=100,
    )
    assert acme.degradation == Degradation(clip_max_tokens_to=256, may_reduce_logprobs=True, may_shed=False)
    assert (acme.weight, acme.max_queue_delay_ms, acme.models) == (2.0, 20.0, ("tiny",))
    assert acme.public_prefixes == ("house",) and acme.admin and acme.digests == [b"\xaa" * 32]
    assert (file.rank(acme), file.rank(zeta)) == (0, 1)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ("wieght: 2", "unknown configuration key 'tenants.acme.wieght'; did you mean 'tenants.acme.weight'"),
        ("quotas: {max_kv_page: 2}", "did you mean 'tenants.acme.quotas.max_kv_pages'"),
        ("weight: -1", r"tenants.acme.weight: expected float.*got -1"),
        ("weight: 0", "tenants.acme.weight: expected"),
        ("weight: .nan", "tenants.acme.weight: expected"),
        ("weight: .inf", "tenants.acme.weight: expected"),
        ("weight: '2'", "tenants.acme.weight: expected"),
        ("quotas: {tokens_per_s: -5}", "tenants.acme.quotas.tokens_per_s: expected"),
        ("quotas: {max_queued: 1.5}", "tenants.acme.quotas.max_queued: expected"),
        ("quotas: [1]", "tenants.acme.quotas: expected a mapping"),
        ("sla: {ttft_ms: 0}", "tenants.acme.sla.ttft_ms: expected"),
        ("priority_class: gold", "tenants.acme.priority_class: there is no class 'gold'; known are default"),
        ("priority_class: defalt", "there is no class 'defalt'; did you mean 'default'"),
        ("public_prefixes: [x]", "there is no public prefix 'x'; known are none"),
        ("admin: 1", "tenants.acme.admin: expected"),
        ("weight: 1\n    weight: 2", "line 6, column 5: the key 'weight' is repeated"),
        ("sla: {ttft_ms: 1, ttft_ms: 1}", "the key 'ttft_ms' is repeated"),
    ],
)
def test_wrong_field_of_a_tenant_is_named(fields: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        entry(fields)
    assert str(refused.value).startswith("tenants.yaml: ")


@pytest.mark.parametrize(
    ("top", "complaint"),
    [
        ("classes: []", "classes: expected a list"),
        ("classes: [a, a]", "classes: a name is repeated"),
        ("classes: ['a b']", "classes: a name matches"),
        (f"classes: {list(map(str, range(17)))}", "classes: expected a list of 1 to 16"),
        ("classes: fast", "classes: expected a list"),
        ("clases: [a]", "did you mean 'classes'"),
        ("public_prefixes: {a: ''}", "public_prefixes.a: expected the text"),
        ("public_prefixes: [a]", "public_prefixes: expected a mapping"),
        ("tenants: {}", "the key 'tenants' is repeated"),
    ],
)
def test_wrong_field_of_the_file_is_named(top: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        entry("weight: 1", top=top)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected a mapping"),
        ("[]", "expected a mapping"),
        ("tenants: []", "tenants: expected a mapping"),
        (f'tenants: {{a: {{key: ["{DIGEST}"]}}}}', "did you mean 'tenants.a.keys'"),
        ("tenants: {a: {keys: [x]}}", r"keys\[0\]: expected 'sha256:'"),
        ("tenants: {a: {}}", "tenants.a"),
        ("tenants: {a: 1}", "tenants.a: expected a mapping"),
        ("tenants: {1: {keys: []}}", "a name matches"),
        ("tenants: [", "cannot be read"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)
def test_wrong_file_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse(text)


@pytest.mark.parametrize("second", ["acme", "zeta"])
def test_repeated_key_is_refused_without_showing_it(second: str) -> None:
    keys = {"acme": {"keys": [DIGEST]}, "zeta": {"keys": [OTHER]}}
    keys[second]["keys"].append(DIGEST)
    with pytest.raises(
        ConfigError, match=f"tenants.{second}.keys: sha256:aaaaaaaa... is (listed|also)"
    ) as refused:
        parse(json.dumps({"tenants": keys}))
    assert DIGEST not in str(refused.value)


def test_text_that_may_be_a_key_is_never_shown() -> None:
    secret = "sk-do-not-show"
    for keys in (f"[{secret}]", secret, f"[[{secret}]]", f"{{a: {secret}}}", f'["{secret}'):
        with pytest.raises(ConfigError) as refused:
            parse(f"tenants:\n  acme:\n    keys: {keys}\n")
        assert secret not in str(refused.value)


@pytest.mark.parametrize(
    ("tagged", "complaint"),
    [
        ("!!bool sk-secret", "a valid bool"),
        ("!!int sk-secret", "a valid int"),
        ("!!timestamp sk-secret", "a valid timestamp"),
        ("!!set [sk-secret]", "a mapping"),
        ("!!map [a]", "a mapping"),
    ],
)
def test_tag_that_does_not_fit_its_value_is_refused(tagged: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"line 1, column 24: expected {complaint}") as refused:
        parse(f"tenants: {{acme: {{keys: {tagged}}}}}")
    assert "sk-secret" not in str(refused.value)


LISTS = "&a0 [x, x]"
for number in range(1, 12):
    LISTS = f"&a{number} [{LISTS}{f', *a{number - 1}' * 9}]"
MERGED = "\n".join(
    f"  t{number}: &t{number} {{<<: [{', '.join([f'*t{number - 1}'] * 10)}]}}" for number in range(1, 12)
)


@pytest.mark.parametrize(
    "text",
    [
        f"classes: [{LISTS}]\ntenants: {{}}",
        f"tenants: {{acme: {{keys: [], models: {LISTS}}}}}",
        "tenants:\n  t0: &t0 {keys: []}\n" + MERGED,
    ],
)
def test_aliases_that_spell_out_a_huge_file_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="aliases expand to more"):
        parse(text)


@pytest.mark.parametrize("text", ["tenants: &a {<<: *a}", "classes: &c [*c]\ntenants: {}"])
def test_recursive_alias_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"line 1, column \d+: the anchor contains an alias of itself"):
        parse(text)


def test_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="expected a plain file"):
        read_tenants(path)


def test_merged_mappings_are_not_duplicates() -> None:
    file = parse(f"tenants:\n  a: &a {{keys: ['{DIGEST}'], weight: 2}}\n  b: {{<<: *a, keys: ['{OTHER}']}}\n")
    assert file.tenants["b"].weight == 2.0 and file.tenants["b"].keys == (OTHER,)


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tenants(path)


def test_documented_file_has_every_field() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "tenants.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    acme = parse(text).tenants["acme"]
    for struct in (acme.sla, acme.quotas, acme.degradation):
        assert None not in msgspec.structs.astuple(struct)
    assert all(field in text for field in TenantEntry.__struct_fields__)
    for refusal in ("rate_limit_exceeded", "slo_infeasible", "shed", "deadline_passed"):
        assert f"`{refusal}`" in page


NUMBERS = st.one_of(st.integers(-3, 10), st.floats(allow_nan=True), st.booleans(), st.none(), st.text())
FIELDS = st.sampled_from(
    ["keys", "weight", "priority_class", "sla", "quotas", "degradation", "models", "admin", "ttft_ms"]
)
VALUES = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=100)
@given(st.dictionaries(st.one_of(st.just("tenants"), st.text()), VALUES, max_size=3))
def test_any_mapping_is_read_or_refused_with_config_error(tree: dict[str, Any]) -> None:
    try:
        parse(yaml.safe_dump(tree))
    except ConfigError as error:
        assert str(error).startswith("tenants.yaml: ")


@settings(max_examples=100)
@given(st.dictionaries(FIELDS, VALUES, max_size=4))
def test_any_tenant_is_read_or_refused_with_config_error(fields: dict[str, Any]) -> None:
    try:
        file = parse(yaml.safe_dump({"tenants": {"acme": {"keys": [], **fields}}}))
    except ConfigError as error:
        assert str(error).startswith("tenants.yaml: tenants.acme") or "unknown" in str(error)
    else:
        assert file.tenants["acme"].weight > 0


def test_schema_accepts_the_same_file_as_the_reader() -> None:
    schema = msgspec.json.schema(TenantsFile)
    known = set(schema["$defs"]["TenantEntry"]["properties"])
    assert {"keys", "weight", "quotas", "sla", "degradation", "public_prefixes"} <= known
    assert schema["$defs"]["TenantEntry"]["additionalProperties"] is False
    assert msgspec.convert(yaml.safe_load(WHOLE), TenantsFile) == parse(WHOLE)


def key(letter: str) -> str:
    return "sha256:" + letter * 64


A, B, C, NEW = (key(letter) for letter in "abce")

BLOCK = f"""# keys of clients
classes: [fast, slow]   # strict

tenants:
  # our own people
  acme:
    weight: 2   # twice the others
    keys:       # rotated in May
      - "{A}"   # alice
      # bob is gone
      - '{B}'   # carol
    quotas:
      max_queued: 5

  zeta:
    keys:
    - {C}
# the end
"""


def keys_of(text: str, tenant: str) -> tuple[str, ...]:
    return parse_tenants(text, "").tenants[tenant].keys


@pytest.mark.parametrize("tenant", ["acme", "zeta", "fresh"])
def test_adding_a_key_keeps_comments_and_order(tenant: str) -> None:
    added = with_key(BLOCK, tenant, NEW)
    lines = added.splitlines()
    assert not [line for line in difflib.ndiff(BLOCK.splitlines(), lines) if line.startswith("-")]
    assert sum(NEW in line for line in lines) == 1


def test_removing_a_key_keeps_the_comments_of_other_keys() -> None:
    left = without_keys(BLOCK, [B])
    assert "# alice" in left and "# carol" not in left and "# bob is gone" in left


@pytest.mark.parametrize("tenant", ["acme", "zeta"])
def test_key_is_added_to_a_file_without_a_last_newline(tenant: str) -> None:
    text = f"tenants:\n  acme:\n    keys:\n    - {A}"
    assert keys_of(with_key(text, tenant, NEW), tenant)[-1] == NEW


@pytest.mark.parametrize("text", ["", "\n", "tenants: {}", "tenants: {}\n", "# no tenant yet\ntenants: {}\n"])
def test_first_key_is_added_to_an_empty_file(text: str) -> None:
    first = with_key(text, "acme", NEW)
    assert keys_of(first, "acme") == (NEW,)
    assert keys_of(with_key(first, "acme", A), "acme") == (NEW, A)
    assert keys_of(with_key(first, "zeta", A), "zeta") == (A,)
    assert text.startswith("#") == first.startswith("#")


@pytest.mark.parametrize(
    "text",
    [
        f"x: &k [{A}]\n",
        f"tenants: {{a: {{keys: [{A}], weight: -1}}}}",
        "tenants: [",
    ],
)
def test_wrong_file_is_not_changed(text: str) -> None:
    with pytest.raises(ConfigError, match="the file: "):
        with_key(text, "acme", NEW)


def test_keys_behind_an_alias_are_left_to_the_author() -> None:
    merged = (
        f"tenants:\n  a: &a {{keys: ['{A}']}}\n  b: {{<<: *a, keys: ['{B}']}}\n  c: {{<<: *a, keys: []}}\n"
    )
    assert keys_of(with_key(merged, "b", NEW), "b") == (B, NEW)
    hidden = "tenants:\n  a: &a {keys: []}\n  b: {<<: *a}\n"
    with pytest.raises(ConfigError, match=f"by hand: add {NEW} to tenants.b.keys"):
        with_key(hidden, "b", NEW)


NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,8}", fullmatch=True)


@st.composite
def files(draw: st.DrawFn) -> TenantsFile:
    names = draw(st.lists(NAMES, max_size=4, unique=True))
    digests = iter(draw(st.permutations("0123456789abcdf")))
    tenants = {
        name: {
            "keys": [key(next(digests)) for _ in range(draw(st.integers(0, 3)))],
            "weight": draw(st.integers(1, 9)),
        }
        for name in names
    }
    return msgspec.convert({"tenants": tenants}, TenantsFile)


@settings(max_examples=60)
@given(files(), st.booleans(), st.integers(1, 6), NAMES, st.data())
def test_changing_keys_keeps_everything_else_in_any_layout(
    file: TenantsFile, flow: bool, indent: int, name: str, data: st.DataObject
) -> None:
    tree = {"tenants": {each: msgspec.to_builtins(entry) for each, entry in file.tenants.items()}}
    text = yaml.safe_dump(tree, default_flow_style=flow or None, indent=indent, sort_keys=False, width=1000)
    added = with_key(text, name, NEW)
    assert keys_of(added, name)[-1] == NEW
    every = [each for entry in parse_tenants(added, "").tenants.values() for each in entry.keys]
    gone = data.draw(st.sets(st.sampled_from(every)))
    left = parse_tenants(without_keys(added, gone), "")
    assert {each for entry in left.tenants.values() for each in entry.keys} == set(every) - gone
    assert {each: entry.weight for each, entry in left.tenants.items() if each != name} == {
        each: entry.weight for each, entry in file.tenants.items() if each != name
    }
