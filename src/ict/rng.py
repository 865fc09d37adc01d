"""Randomness as a function of (seed, stream, step, sample), never of history.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a counter into four
32-bit words. The counter says *what* is being drawn, so the same draw gives the same number after a restart, for
any batch size, on any number of ranks, on a CPU or a GPU.

    counter = (block of four elements, sample, step, stream)        key = seed
"""

import math
from enum import IntEnum

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF


class Stream(IntEnum):
    """What a number is drawn for; two streams never share a number."""

    NOISE = 1
    LEVEL = 2
    FLIP = 3
    DROPOUT = 4
    ORDER = 5
    SAMPLING = 6
    LABEL = 7
    INTERVAL = 8
    START = 9


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words (held in int64) for each counter; counters broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & MASK32, (key >> 32) & MASK32
    for _ in range(10):
        # A product of two 32-bit words may pass 2^63 and wrap; its bits are still right, so both halves are.
        high, low = _multiply(c0, 0xD2511F53)
        high2, low2 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high ^ c3 ^ k1, low
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def _multiply(word: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    product = word * constant
    return (product >> 32) & MASK32, product & MASK32


def words(samples: Tensor, count: int, *, seed: int, step: int | Tensor, stream: Stream) -> Tensor:
    """`count` 32-bit words for each of `samples` (numbers of the samples, int64 [B]) -> int64 [B, count].

    The step may be a tensor of one number on the same device, whose value is then read when the draw is made.
    """
    blocks = torch.arange(-(-count // 4), device=samples.device, dtype=torch.int64)
    counter = (
        blocks[None, :],
        samples[:, None],
        torch.zeros_like(samples[:1, None]) + (step & MASK32),
        torch.zeros_like(samples[:1, None]) + (int(stream) | (step >> 32) << 8),
    )
    drawn = torch.stack(philox(counter, seed), dim=-1)
    return drawn.reshape(len(samples), -1)[:, :count]


def uniform(samples: Tensor, count: int, *, seed: int, step: int | Tensor, stream: Stream) -> Tensor:
    """Uniform numbers strictly inside (0, 1) -> float64 [B, count]."""
    return (words(samples, count, seed=seed, step=step, stream=stream).double() + 0.5) / 2**32


def normal(
    samples: Tensor, shape: tuple[int, ...], *, seed: int, step: int | Tensor, stream: Stream = Stream.NOISE
) -> Tensor:
    """Standard normal numbers -> float32 [B, *shape], by Box and Muller in float64.

    Float64 makes the float32 result the same on every device but for a rare last bit.
    """
    home = samples.device
    if home.type == "mps":  # no float64 there
        samples = samples.cpu()
    count = math.prod(shape)
    u = uniform(samples, count + count % 2, seed=seed, step=step, stream=stream)
    radius, angle = torch.sqrt(-2 * torch.log(u[:, 0::2])), 2 * math.pi * u[:, 1::2]
    z = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)
    return z.reshape(len(samples), -1)[:, :count].reshape(-1, *shape).to(torch.float32).to(home)


def permutation(n: int, *, seed: int, epoch: int) -> Tensor:
    """A shuffled 0 … n-1 (int64 [n], on the CPU): sorts by random keys, so it is the same in every torch version."""
    drawn = words(torch.arange(n), 2, seed=seed, step=epoch, stream=Stream.ORDER)
    return torch.argsort((drawn[:, 0] << 31) | (drawn[:, 1] >> 1), stable=True)
