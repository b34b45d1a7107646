import pytest
import torch

from baton.kernels.sample import philox

# philox4x32-10 from the known-answer vectors that Random123 publishes: counter, key, words.
PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (*PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    counter_0, counter_1, counter_2, counter_3 = (torch.tensor(word) for word in counter)
    got = philox((torch.tensor(key[0]), torch.tensor(key[1])), (counter_0, counter_1, counter_2, counter_3))
    assert tuple(got.tolist()) == words


def test_philox_broadcasts_and_ignores_high_bits() -> None:
    zero, column, row = torch.tensor(0), torch.arange(3), torch.arange(2)[:, None]
    words = philox((zero, zero), (column, row, zero, zero))
    high = philox((zero + 2**32, zero), (column, row, zero - 2**32, zero))
    assert words.shape == (2, 3, 4)
    assert torch.equal(words, high)
    assert len(set(words.flatten().tolist())) == words.numel()
