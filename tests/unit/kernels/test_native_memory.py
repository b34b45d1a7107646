"""Memory in huge pages."""

import gc
import weakref

import pytest
import torch

from baton.kernels.native import CHUNK_BYTES, HugeArena, give_back_freed_memory, huge_zeros


def test_zeros_have_their_shape_and_can_be_written() -> None:
    tensor = huge_zeros((3, 5), torch.float32)
    assert tensor.shape == (3, 5) and not tensor.any()
    assert huge_zeros((0, 4), torch.int32).shape == (0, 4)
    tensor[2, 4] = 7
    assert tensor.sum() == 7


def test_pieces_of_an_arena_do_not_overlap() -> None:
    arena = HugeArena()
    pieces = [arena.empty(number, dtype) for number in (1, 7, 100) for dtype in (torch.int8, torch.float32)]
    for index, piece in enumerate(pieces):
        piece.fill_(index)
    for index, piece in enumerate(pieces):
        assert (piece == index).all()
        assert piece.data_ptr() % 64 == 0


def test_tensor_that_does_not_fit_in_the_chunk_gets_a_new_chunk() -> None:
    arena = HugeArena()
    first, large, last = (arena.empty(number, torch.uint8) for number in (10, CHUNK_BYTES + 1, 10))
    large[-1], first[:], last[:] = 3, 1, 2
    assert large[-1] == 3 and first.sum() == 10 and last.sum() == 20


def test_memory_goes_with_the_last_tensor_in_it() -> None:
    arena = HugeArena()
    chunk = weakref.ref(arena.empty(1, torch.uint8).untyped_storage())
    piece = arena.empty(4, torch.float32)
    del arena
    piece.fill_(1)
    assert piece.sum() == 4
    del piece
    gc.collect()
    assert chunk() is None


def test_memory_that_others_had_mapped_is_freed_before_the_cache_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: calls.append("ipc"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("device"))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: calls.append("host"), raising=False)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 7)
    assert give_back_freed_memory() == 7
    assert calls == ["ipc", "device", "host"]


def test_without_a_gpu_torch_has_no_memory_of_one() -> None:
    if not torch.cuda.is_initialized():
        assert give_back_freed_memory() == 0
