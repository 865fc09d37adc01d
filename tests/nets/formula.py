"""Weights and inputs by a formula: the same numbers in any framework, so that two implementations can be compared."""

import math
import zlib

import numpy as np


def numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in (-1, 1) that look random: an integer hash of the name and the place -> float32."""
    with np.errstate(over="ignore"):
        x = np.arange(math.prod(shape), dtype=np.uint32) * np.uint32(0x9E3779B1) ^ np.uint32(zlib.crc32(name.encode()))
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
        x = x ^ (x >> np.uint32(16))
    return ((x >> np.uint32(8)).astype(np.float64) / 2**23 - 1 + 2**-24).reshape(shape).astype(np.float32)


def weight(name: str, shape: tuple[int, ...], *, fan_in: int) -> np.ndarray:
    """A matrix or a filter of unit gain."""
    return numbers(name, shape) * np.float32(math.sqrt(3 / fan_in))


def near(name: str, shape: tuple[int, ...], centre: float) -> np.ndarray:
    """A bias (around 0) or the scale of a norm (around 1)."""
    return np.float32(centre) + np.float32(0.2) * numbers(name, shape)
