import difflib

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.gateway.tenants.file import TenantsFile, parse_tenants, with_key, without_keys


def key(letter: str) -> str:
    return "sha256:" + letter * 64


A, B, C, NEW = (key(letter) for letter in "abce")

BLOCK = f"""# who may come in
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
FLOW = f'tenants: {{acme: {{keys: ["{A}", "{B}"], weight: 2}}, zeta: {{keys: ["{C}"]}}}}\n'


def keys_of(text: str, tenant: str) -> tuple[str, ...]:
    return parse_tenants(text, "").tenants[tenant].keys


@pytest.mark.parametrize("text", [BLOCK, FLOW, BLOCK.rstrip("\n"), FLOW.rstrip("\n")])
@pytest.mark.parametrize("tenant", ["acme", "zeta", "fresh"])
def test_a_key_is_added_and_taken_out_again(text: str, tenant: str) -> None:
    added = with_key(text, tenant, NEW)
    before = keys_of(text, tenant) if tenant != "fresh" else ()
    assert keys_of(added, tenant) == (*before, NEW)
    back = without_keys(added, [NEW])
    assert keys_of(back, tenant) == before
    if tenant != "fresh":
        assert parse_tenants(back, "") == parse_tenants(text, "")


@pytest.mark.parametrize("tenant", ["acme", "zeta", "fresh"])
def test_comments_and_order_stay(tenant: str) -> None:
    added = with_key(BLOCK, tenant, NEW)
    lines = added.splitlines()
    assert not [line for line in difflib.ndiff(BLOCK.splitlines(), lines) if line.startswith("-")]
    assert sum(NEW in line for line in lines) == 1


def test_the_other_keys_comments_stay_when_one_goes() -> None:
    left = without_keys(BLOCK, [B])
    assert "# alice" in left and "# carol" not in left and "# bob is gone" in left


@pytest.mark.parametrize("text", [BLOCK, FLOW])
def test_the_last_key_of_a_tenant_goes(text: str) -> None:
    left = without_keys(text, [A, B])
    assert keys_of(left, "acme") == () and keys_of(left, "zeta") == (C,)
    assert keys_of(with_key(left, "acme", NEW), "acme") == (NEW,)


def test_keys_of_several_tenants_go_at_once() -> None:
    left = without_keys(BLOCK, [A, C])
    assert keys_of(left, "acme") == (B,) and keys_of(left, "zeta") == ()


@pytest.mark.parametrize("text", ["", "\n", "tenants: {}", "tenants: {}\n", "# nobody yet\ntenants: {}\n"])
def test_a_file_begins_with_its_first_key(text: str) -> None:
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
def test_a_wrong_file_is_not_touched(text: str) -> None:
    with pytest.raises(ConfigError, match="the file: "):
        with_key(text, "acme", NEW)


def test_what_is_written_too_cleverly_is_left_to_its_author() -> None:
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


@settings(max_examples=150, deadline=None)
@given(files(), st.booleans(), st.integers(1, 6), NAMES, st.data())
def test_any_layout_keeps_everything_else(
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
