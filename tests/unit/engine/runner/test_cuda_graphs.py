"""Which batch sizes get a graph; what a replay yields is tested where there is a GPU."""

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.runner.cuda_graphs import graph_sizes


@given(max_num_seqs=st.integers(1, 2000))
def test_every_batch_has_a_graph_that_is_not_much_larger(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs and sizes[0] == 1
    for batch in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= batch)
        assert size - batch < max(8, batch / 4), f"{batch} rows padded to {size}"


def test_sizes_grow_coarser() -> None:
    assert graph_sizes(4) == [1, 2, 4]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]
