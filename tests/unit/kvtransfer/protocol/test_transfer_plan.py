"""Plans against an oracle that moves every (token, layer, key or value, head) by itself."""

import time
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton.errors import ConfigError
from baton.kvtransfer.protocol.transfer_plan import Pages, TransferPlan, plan_transfer, sent_heads, shards_of
from baton.pages import PageLayout
from tests.transfer_ends import runs_of

NUM_HEADS = 12  # splits by 2 and by 3: ranks whose heads overlap partly
TP_SIZES = (1, 2, 3, 4, 12, 24, 48)  # with more ranks than heads, some hold copies
STAGES = ((), (1, 4), (3, 2), (1, 1, 3), (5,))  # layers of each pipeline stage
Pool = NDArray[np.int32]  # [pages, layers, num_planes, heads of the rank, page_size, words of a row]


def layout(tp_size: int, page_size: int, **changes: Any) -> PageLayout:
    shape: dict[str, Any] = {
        "tp_size": tp_size,
        "page_size": page_size,
        "num_layers": 2,
        "num_kv_heads": NUM_HEADS,
        "head_dim": 3,
        "dtype": "float32",
    }
    return PageLayout(**{**shape, **changes})


def pool_of(layout: PageLayout, num_pages: int, first_value: int, rank: int = 0) -> Pool:
    """Every element has a value of its own."""
    num_layers = len(layout.layers_of(rank))
    heads = layout.heads_per_rank
    shape = (num_pages, num_layers, layout.num_planes, heads, layout.page_size, layout.row_bytes // 4)
    return np.arange(first_value, first_value + int(np.prod(shape)), dtype=np.int32).reshape(shape)


def move(
    plan: TransferPlan, units: range, source: Pool, destination: Pool, pages: tuple[Pages, Pages]
) -> int:
    """Apply the plan's runs; the bytes moved."""
    runs = runs_of(plan, units.start, units.stop, *pages)
    from_bytes, to_bytes = source.reshape(-1).view(np.uint8), destination.reshape(-1).view(np.uint8)
    for begin, end in zip(runs.source_offset_N.tolist(), runs.destination_offset_N.tolist(), strict=True):
        to_bytes[end : end + runs.run_bytes] = from_bytes[begin : begin + runs.run_bytes]
    return runs.num_bytes


def move_slowly(
    layouts: tuple[PageLayout, PageLayout],
    ranks: tuple[int, int],
    tokens: range,
    source: Pool,
    destination: Pool,
    pages: tuple[list[int], list[int]],
    layers: tuple[int, int] | None = None,
) -> int:
    """The definition: element by element, by where a token of a head lies in each rank's pages."""
    num_moved = 0
    copies = [max(1, cut.tp_size // NUM_HEADS) for cut in layouts]  # each is served by one of the source's
    if ranks[0] % copies[0] != ranks[1] % copies[1] * copies[0] // copies[1]:
        return 0
    for token, head in product(tokens, range(layouts[0].num_kv_heads)):
        places = []
        for layout, rank, page_ids in zip(layouts, ranks, pages, strict=True):
            own_head = head - rank % layout.tp_size * NUM_HEADS // layout.tp_size
            page = page_ids[token // layout.page_size]
            places.append((page, own_head, token % layout.page_size))
        if all(0 <= own < cut.heads_per_rank for (_, own, _), cut in zip(places, layouts, strict=True)):
            (page, own, offset), (to_page, to_own, to_offset) = places
            ours, theirs = (cut.layers_of(rank) for cut, rank in zip(layouts, ranks, strict=True))
            planes = range(layouts[0].num_planes)
            for layer, kv in product(range(*(layers or (0, layouts[0].num_layers))), planes):
                if layer in ours and layer in theirs:
                    content = source[page, layer - ours.start, kv, own, offset]
                    destination[to_page, layer - theirs.start, kv, to_own, to_offset] = content
                    num_moved += content.nbytes
    return num_moved


@st.composite
def cuts(draw: st.DrawFn, /, **changes: Any) -> tuple[PageLayout, int]:
    """A layout and one of its ranks."""
    page_size = draw(st.sampled_from((1, 2, 4, 8, 16)))
    cut = layout(draw(st.sampled_from(TP_SIZES)), page_size, **changes)
    return cut, draw(st.integers(0, cut.num_ranks - 1))


@st.composite
def staged(draw: st.DrawFn) -> tuple[PageLayout, int]:
    """A layout of five layers in some stages, and one of its ranks."""
    return draw(cuts(num_layers=5, stage_layers=draw(st.sampled_from(STAGES))))


CODES: dict[str, Any] = {"head_dim": 6, "cache_dtype": "int8"}


@given(
    st.one_of(
        *(st.tuples(cuts(**keys), cuts(**keys)) for keys in ({}, CODES, {"num_planes": 1})),
        st.tuples(staged(), staged()),
    ),
    st.data(),
)
def test_any_piece_of_scattered_pages(
    both: tuple[tuple[PageLayout, int], tuple[PageLayout, int]], data: st.DataObject
) -> None:
    one, other = both
    layouts, ranks = (one[0], other[0]), (one[1], other[1])
    plan = plan_transfer(*layouts, *ranks)
    num_units = data.draw(st.integers(0, 24))
    first = data.draw(st.integers(0, num_units))
    num_pages = [side.num_pages(num_units) for side in (plan.source, plan.destination)]
    pages = tuple(data.draw(st.permutations(range(count + 2)))[:count] for count in num_pages)
    source = pool_of(layouts[0], num_pages[0] + 2, 0, ranks[0])
    got = pool_of(layouts[1], num_pages[1] + 2, -(10**9), ranks[1])
    expected = got.copy()
    moved = move(plan, range(first, num_units), source, got, (np.array(pages[0], dtype=np.int64), pages[1]))
    tokens = range(first * plan.unit_tokens, num_units * plan.unit_tokens)
    assert moved == move_slowly(layouts, ranks, tokens, source, expected, (pages[0], pages[1]))
    assert moved == (num_units - first) * plan.unit_bytes
    assert np.array_equal(got, expected)


@given(cuts(), cuts(), st.integers(1, 7), st.integers(1, 7))
def test_groups_of_layers_together_move_all_layers(
    one: tuple[PageLayout, int], other: tuple[PageLayout, int], num_layers: int, num_groups: int
) -> None:
    layouts = tuple(layout(cut.tp_size, cut.page_size, num_layers=num_layers) for cut, _ in (one, other))
    (source_layout, layout_there), ranks = layouts, (one[1], other[1])
    num_groups = min(num_groups, num_layers)
    num_tokens = 2 * max(cut.page_size for cut in layouts)
    pages = tuple(list(range(num_tokens // cut.page_size))[::-1] for cut in layouts)
    source, got = pool_of(source_layout, len(pages[0]), 0), pool_of(layout_there, len(pages[1]), -(10**9))
    expected, whole = got.copy(), plan_transfer(source_layout, layout_there, *ranks)
    num_bytes = 0
    for layers in source_layout.layer_groups(num_groups):
        plan = plan_transfer(source_layout, layout_there, *ranks, layers)
        units = range(plan.num_units(num_tokens))
        num_bytes += move(plan, units, source, got, (pages[0], pages[1]))
        move_slowly(
            (source_layout, layout_there),
            ranks,
            range(num_tokens),
            source,
            expected,
            (pages[0], pages[1]),
            layers,
        )
        assert np.array_equal(got, expected)
        assert len(plan.source.run_offset_R) in (0, 1) or whole.run_bytes == plan.run_bytes
    assert num_bytes == whole.num_units(num_tokens) * whole.unit_bytes


@given(cuts(), cuts(), st.sampled_from(("int8", "fp8")))
def test_codes_are_sent_for_the_runs_of_the_same_pages(
    one: tuple[PageLayout, int], other: tuple[PageLayout, int], transfer_dtype: str
) -> None:
    plain = plan_transfer(one[0], other[0], one[1], other[1])
    layouts = [msgspec.structs.replace(cut, transfer_dtype=transfer_dtype) for cut, _ in (one, other)]
    coded = plan_transfer(layouts[0], layouts[1], one[1], other[1])
    assert coded.run_bytes == plain.run_bytes == plain.sent_run_bytes
    assert coded.row_bytes == plain.row_bytes and plain.as_stored() is plain
    for side, plain_side in ((coded.source, plain.source), (coded.destination, plain.destination)):
        assert np.array_equal(side.run_offset_R, plain_side.run_offset_R)
    assert coded.sent_unit_bytes * one[0].row_bytes == plain.sent_unit_bytes * (one[0].head_dim + 2)
    assert coded.sent_run_bytes * len(coded.source.run_offset_R) == coded.sent_unit_bytes
    stored = coded.as_stored()
    assert (stored.sent_unit_bytes, stored.sent_run_bytes) == (plain.unit_bytes, plain.run_bytes)
    assert stored.sent_codes is None


@pytest.mark.parametrize("layers", [(0, 3), (1, 1), (-1, 1), (2, 1)])
def test_layers_that_do_not_exist_are_refused(layers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="are out of range"):
        plan_transfer(layout(1, 16), layout(1, 16), 0, 0, layers)


@pytest.mark.parametrize("layers", [(0, 1), (1, 3), (2, 2)])
def test_layers_of_another_stage_are_refused(layers: tuple[int, int]) -> None:
    staged = layout(1, 16, num_layers=5, stage_layers=(2, 3))
    with pytest.raises(ValueError, match=r"are out of range: the ranks share \[2, 5\)"):
        plan_transfer(layout(1, 16, num_layers=5), staged, 0, 1, layers)


@given(cuts(), cuts())
def test_rows_divide_all_that_moves(one: tuple[PageLayout, int], other: tuple[PageLayout, int]) -> None:
    plan = plan_transfer(one[0], other[0], one[1], other[1])
    num_units = 2 * max(plan.source.units_per_page, plan.destination.units_per_page)
    runs = runs_of(plan, 0, num_units, list(range(num_units)), list(range(num_units))[::-1])
    for offsets in (runs.source_offset_N, runs.destination_offset_N):
        assert not np.any(offsets % plan.row_bytes)
    assert runs.run_bytes % plan.row_bytes == 0


@given(st.sampled_from(TP_SIZES), st.sampled_from(TP_SIZES))
def test_each_rank_gets_each_of_its_heads_once(tp_size: int, other_tp_size: int) -> None:
    source, destination = layout(tp_size, 4), layout(other_tp_size, 8)
    for rank in range(other_tp_size):
        got = [head for peer in range(tp_size) for head in sent_heads(source, destination, peer, rank)]
        assert got == [*destination.heads_of(rank)]


def test_equal_layouts_move_whole_pages() -> None:
    cut = layout(2, 16)
    plan = plan_transfer(cut, cut, 1, 1)
    runs = runs_of(plan, 1, 3, [7, 3, 5], [0, 9, 2])
    assert plan.run_bytes == plan.unit_bytes == plan.row_bytes == cut.page_bytes
    assert runs.source_offset_N.tolist() == [3 * cut.page_bytes, 5 * cut.page_bytes]
    assert runs.destination_offset_N.tolist() == [9 * cut.page_bytes, 2 * cut.page_bytes]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 3),
        ("num_planes", 1),
        ("num_kv_heads", 24),
        ("head_dim", 4),
        ("dtype", "bfloat16"),
        ("cache_dtype", "fp8"),
        ("transfer_dtype", "fp8"),
    ],
)
def test_another_model_is_refused_by_the_field(field: str, value: int | str) -> None:
    with pytest.raises(ConfigError, match=f"{field} .* and {field} {value}"):
        plan_transfer(layout(1, 16), layout(1, 16, **{field: value}), 0, 0)
    with pytest.raises(ConfigError, match=field):
        shards_of(layout(1, 16), layout(1, 16, **{field: value}))


@pytest.mark.parametrize("ranks", [(2, 0), (0, 1), (-1, 0)])
def test_a_rank_that_does_not_exist_is_refused(ranks: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is out of range"):
        plan_transfer(layout(2, 16), layout(1, 16), *ranks)


@pytest.mark.parametrize(
    ("first", "stop", "source_pages", "destination_pages"),
    [
        (0, 3, [0, 1], [0, 1, 2]),  # 3 units lie in 2 pages of 16 and 3 of 8: enough
        (0, 5, [0, 1], [0, 1, 2, 3, 4]),
        (0, 4, [0, 1], [0, 1, 2]),
        (2, 1, [0, 1], [0, 1, 2]),
        (-1, 1, [0, 1], [0, 1, 2]),
        (0, 2, [-1], [0, 1]),
        (0, 2, [0], [0, -1]),
    ],
)
def test_units_must_lie_in_the_pages(
    first: int, stop: int, source_pages: list[int], destination_pages: list[int]
) -> None:
    plan = plan_transfer(layout(1, 16), layout(1, 8), 0, 0)
    if (first, stop) == (0, 3):
        assert runs_of(plan, first, stop, source_pages, destination_pages).num_bytes == 3 * plan.unit_bytes
        return
    with pytest.raises(ValueError, match="do not lie in|start at 0"):
        runs_of(plan, first, stop, source_pages, destination_pages)


def test_a_million_runs_are_planned_within_50_ms() -> None:
    shape: dict[str, int | str] = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    source, destination = layout(1, 16, **shape), layout(1, 32, **shape)
    num_tokens, spans_s = 32768, []
    pages = np.random.default_rng(0).permutation(num_tokens // 16)
    for _ in range(5):
        start_s = time.thread_time()  # other processes may have the cores meanwhile
        plan = plan_transfer.__wrapped__(source, destination, 0, 0)
        runs = runs_of(plan, 0, plan.num_units(num_tokens), pages, pages[: num_tokens // 32])
        spans_s.append(time.thread_time() - start_s)
    assert len(runs.source_offset_N) == 2**20 and runs.num_bytes == num_tokens * source.token_bytes
    assert min(spans_s) < 0.05, spans_s
