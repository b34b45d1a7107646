import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore

from baton.engine.models import parallel
from baton.engine.models.parallel import TensorParallel, TorchGroup, join_stage
from baton.engine.runner.replica_rank import ReplicaRank
from baton.errors import ConfigError, WorkerLost
from baton.kernels import collectives
from baton.kernels.collectives import SharedMemoryGroup
from tests.tensor_parallel_peer import CPU, DTYPES, Pair, values

dtypes = pytest.mark.parametrize("dtype", DTYPES)


def joined(size: int, num_stages: int = 1) -> list[TensorParallel]:
    """The ranks of some stages of so many ranks, in one process."""
    store = HashStore()
    with ThreadPoolExecutor(size * num_stages) as threads:

        def join(rank: int) -> TensorParallel:
            return join_stage(store, rank // size, rank % size, size, CPU)

        return list(threads.map(join, range(size * num_stages)))


def sums(ranks: list[TensorParallel], inputs: list[Tensor]) -> list[Tensor]:
    """The sum that each rank gets."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda rank, x: rank.all_reduce(x.clone()), ranks, inputs))


@dtypes
def test_all_reduce_is_the_sum_on_both_ranks(pair: Pair, tiny_model: Path, dtype: str) -> None:
    expected = values(0, 5, 7, dtype=dtype) + values(1, 5, 7, dtype=dtype)
    assert torch.equal(pair.run("reduce", tiny_model, dtype), expected)


def test_no_rank_leaves_an_empty_sum_before_the_other_has_come() -> None:
    ranks = joined(2)
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(ranks[0].all_reduce, torch.zeros(0, 7))
        assert not wait([early], timeout=0.3).done
        assert ranks[1].all_reduce(torch.zeros(0, 7)).shape == early.result().shape == (0, 7)


@dtypes
def test_all_gather_puts_the_ranks_side_by_side(pair: Pair, tiny_model: Path, dtype: str) -> None:
    parts = [values(rank, 5, 14, dtype=dtype)[:, ::2] for rank in (0, 1)]
    assert torch.equal(pair.run("gather", tiny_model, dtype), torch.cat(parts, dim=1))


def test_each_stage_sums_in_shared_memory_of_its_own() -> None:
    ranks = joined(2, num_stages=2)
    assert all(isinstance(rank.group, SharedMemoryGroup) for rank in ranks)
    inputs = [values(index, 5, 7, dtype="float32") for index in range(4)]
    expected = [inputs[0] + inputs[1], inputs[2] + inputs[3]]
    for index, got in enumerate(sums(ranks, inputs)):
        assert torch.equal(got, expected[index // 2])


def test_sum_over_four_ranks_does_not_depend_on_the_rows_beside_it() -> None:
    ranks = joined(4)
    inputs = [values(rank.rank, 40, 300, dtype="float32") for rank in ranks]
    whole, alone = sums(ranks, inputs), sums(ranks, [x[:1] for x in inputs])
    assert all(torch.equal(a[0], w[0]) for a, w in zip(alone, whole, strict=True))


def assert_ranks_sum_through_gloo() -> None:
    ranks, inputs = joined(2), [values(rank, 5, 7, dtype="float32") for rank in range(2)]
    assert all(isinstance(rank.group, TorchGroup) for rank in ranks)
    assert all(torch.equal(got, inputs[0] + inputs[1]) for got in sums(ranks, inputs))


def test_ranks_sum_through_gloo_when_one_of_them_cannot_map_the_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OneRank(SharedMemoryGroup):
        def __init__(
            self, descriptor: int, rank: int, size: int, processes: Sequence[int], timeout: timedelta
        ) -> None:
            if rank == 1:
                raise OSError("no memory")
            super().__init__(descriptor, rank, size, processes, timeout)

    monkeypatch.setattr(collectives, "SharedMemoryGroup", OneRank)
    assert_ranks_sum_through_gloo()
    assert "no memory" in caplog.text and "sum through gloo, slower" in caplog.text


@pytest.mark.parametrize("call", ["memfd_create", "pidfd_open"])
def test_ranks_sum_through_gloo_where_python_lacks_a_call_of_linux(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, call)
    assert_ranks_sum_through_gloo()
    assert call in caplog.text


def test_ranks_sum_through_gloo_when_the_first_has_no_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def memfd_create(name: str, flags: int) -> int:
        raise OSError("no memory")

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    assert_ranks_sum_through_gloo()
    assert "no memory" in caplog.text


def test_group_of_one_exchanges_nothing() -> None:
    alone, x = ReplicaRank(), values(0, 3, 4, dtype="float32")
    assert alone.tp.all_reduce(x) is x and alone.tp.all_gather(x) is x and alone.smallest(5) == 5
    alone.send_command(b"no rank listens")
    with pytest.raises(ValueError, match="receives no commands"):
        alone.receive_command()


def test_shards_tile_the_whole() -> None:
    shards = [TensorParallel(rank, 4).shard(12, what="heads") for rank in range(4)]
    assert shards == [(0, 3), (3, 6), (6, 9), (9, 12)]
    with pytest.raises(ConfigError, match="heads: 10 cannot be split over 4 tensor-parallel ranks"):
        TensorParallel(0, 4).shard(10, what="heads")


def test_killed_peer_is_reported_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost = Pair(tmp_path)
    lost.process.kill()
    lost.process.join()
    with caplog.at_level("INFO"), pytest.raises(WorkerLost) as error:
        lost.rank.tp.all_reduce(torch.zeros(4))
    assert str(error.value) == "tensor-parallel rank 0 of 2 lost a peer"
    (logged,) = caplog.messages  # with the library's own words
    assert len(logged) > len(f"{error.value}: ") and logged.startswith(f"{error.value}: ")
    with pytest.raises(WorkerLost, match="rank 1: the peer is gone"):
        lost.rank.smallest(1)


def test_last_peer_ends_when_rank_0_goes_away(tmp_path: Path) -> None:
    left = Pair(tmp_path)
    assert left.rank.links is not None
    left.rank.links.close()
    left.process.join(20)
    assert left.process.exitcode not in (None, 0)


def test_rank_without_peers_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "JOIN_TIMEOUT", timedelta(milliseconds=100))
    with pytest.raises(WorkerLost, match="rank 0 of 2 did not meet the others"):
        join_stage(FileStore(str(tmp_path / "store"), 2), 0, 0, 2, CPU)


def test_sockets_of_gloo_listen_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def listening() -> set[tuple[str, int]]:
        connections = psutil.Process().net_connections("inet")
        return {(*each.laddr,) for each in connections if each.status == psutil.CONN_LISTEN}

    before = listening()
    monkeypatch.delattr(os, "memfd_create")
    ranks = joined(2)
    assert {host for host, _ in listening() - before} == {"127.0.0.1"}
    assert len(ranks) == 2
