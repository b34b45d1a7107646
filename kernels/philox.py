"""Philox4x32-10, the counter-based generator of Random123 (Salmon et al., SC'11), in plain torch.

Triton brings its own (`tl.philox`); both give the published known answers.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Four random 32-bit words for each counter: int64 in [0, 2^32), shape [..., 4].

    key and counter: int64 tensors that broadcast; of each the low 32 bits are used.
    """
    key_0, key_1 = (word & _MASK for word in key)
    word_0, word_1, word_2, word_3 = (word & _MASK for word in counter)
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, which keeps all 64 bits; the shift must not drag the sign in.
        product_0 = word_0 * _MULTIPLIERS[0]
        product_1 = word_2 * _MULTIPLIERS[1]
        word_0 = ((product_1 >> 32) & _MASK) ^ word_1 ^ key_0
        word_2 = ((product_0 >> 32) & _MASK) ^ word_3 ^ key_1
        word_1 = product_1 & _MASK
        word_3 = product_0 & _MASK
        key_0 = (key_0 + _WEYL[0]) & _MASK
        key_1 = (key_1 + _WEYL[1]) & _MASK
    # Two rounds mix every input into every word, so all four have the broadcast shape by now.
    return torch.stack((word_0, word_1, word_2, word_3), dim=-1)
