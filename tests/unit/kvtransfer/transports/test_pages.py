import os
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.engine.runner.model_runner import KvPool
from baton.kvtransfer.transports.pages import (
    PageMemory,
    PeerGenerations,
    SharedPool,
    as_words,
    map_shared,
)
from tests.layouts import a_layout


def test_shared_pool_is_zeros_and_takes_no_memory_before_its_first_write() -> None:
    pool = SharedPool()
    tensor = pool.zeros((1000, 4, 1024), torch.float32)
    assert tensor.shape == (1000, 4, 1024) and os.fstat(pool.file.descriptor).st_blocks == 0
    assert not tensor[7].any()
    assert (pool.memory.num_pages, pool.memory.page_bytes) == (1000, 4 * 4096)
    pool.close()
    tensor[999] = 1.0  # the tensor stays good
    assert pool.memory.view()[999 * 4 * 4096 + 2 : 999 * 4 * 4096 + 4].tobytes() == b"\x80\x3f"


def test_an_engines_pool_lives_in_shared_memory() -> None:
    layout = a_layout(page_size=4, dtype="bfloat16")
    shared = SharedPool()
    pool = KvPool(layout, 6, 0, torch.device("cpu"), shared.zeros)
    assert shared.memory.page_bytes == layout.page_bytes and shared.memory.num_pages == 6
    pages = PageMemory.of_peer(shared.file.descriptor, 6, layout.page_bytes)
    pages.view()[layout.page_bytes : layout.page_bytes + 2] = b"\x80\x3f"
    assert pool.device[1].flatten()[0] == 1.0 and int((pool.device != 0).sum()) == 1
    mapped = f"{pages.address:x}-"
    del pages
    assert mapped not in Path("/proc/self/smaps").read_text()
    shared.close()


def test_a_child_of_a_writer_has_no_way_to_write() -> None:
    pool = SharedPool()
    pool.zeros((4, 4096), torch.uint8)
    pages = PageMemory.of_peer(pool.file.descriptor, 4, 4096)
    mapped = f"{pages.address:x}-"
    smaps = Path("/proc/self/smaps").read_text()
    flags = smaps[smaps.index(mapped) :].split("VmFlags:")[1].splitlines()[0]
    assert "dc" in flags.split()  # not copied at a fork
    pool.close()


def test_shared_file_keeps_its_size() -> None:
    pool = SharedPool()
    pool.zeros((2, 4096), torch.uint8)
    for size in (4096, 3 * 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.file.descriptor, size)
    pool.close()


def test_generations_are_read_by_peers_and_written_by_the_owner_alone() -> None:
    pool = SharedPool()
    pool.zeros((8, 64), torch.uint8)
    descriptor = pool.generations.file.read_only()
    with pytest.raises(PermissionError):
        map_shared(descriptor, 32)
    peer = PeerGenerations(descriptor, 8)
    os.close(descriptor)
    pages = np.array([3, 5])
    assert not peer.match(pages, as_words([1, 1]))
    pool.generations.grant([3, 5], [4, 9])
    assert peer.match(pages, as_words([4, 9])) and not peer.match(pages, as_words([4, 8]))
    pool.generations.revoke([5])
    assert not peer.match(pages, as_words([4, 9])) and peer.match(pages[:1], as_words([4]))
    pool.close()


def test_no_generation_looks_like_revoked() -> None:
    assert as_words([0, 1, 2**32 - 2, 2**32 - 1, 2**40]).min() > 0


def test_pages_of_a_tensor_are_where_the_tensor_is() -> None:
    tensor = torch.arange(24, dtype=torch.int16).view(4, 6)
    memory = PageMemory.of(tensor)
    assert (memory.num_pages, memory.page_bytes, memory.address) == (4, 12, tensor.data_ptr())
    assert memory.view().tobytes() == tensor.numpy().tobytes()
    with pytest.raises(ValueError, match="contiguous"):
        PageMemory.of(tensor[:, ::2])
