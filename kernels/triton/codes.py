"""Conversion between floats and codes of one byte, by operations that every GPU has.

The bits are those of the C kernels.
"""

from __future__ import annotations

from baton.kernels.triton.kernel import jit, tl


@jit
def fp8_as_half(codes: tl.tensor) -> tl.tensor:
    """The values of E4M3 codes, int8, divided by FP8_AS_HALF: fp16, exact. No code may be a NaN."""
    bits = codes.to(tl.int16)
    return ((bits & 127) << 7 | (bits & 128) << 8).to(tl.float16, bitcast=True)


@jit
def float_to_fp8(values: tl.tensor) -> tl.tensor:
    """The E4M3 codes, int8, of fp32 values below 464, rounded to nearest even."""
    bits = values.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 128
    bits = bits & 0x7FFFFFFF
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1) - (120 << 23)) >> 20
    # Below 2^-6 codes are 2^-9 apart, as are floats from 2^14 on.
    denormal = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (sign | tl.where(bits >= 121 << 23, normal, denormal)).to(tl.int8)


@jit
def scaled_to_int8(values: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """values * factor, below 127.5 and fp32, rounded to nearest even: int8."""
    shifted = tl.fma(values, factor, 12582912.0)  # 1.5 * 2^23 rounds to the nearest integer, once
    return (shifted.to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)
