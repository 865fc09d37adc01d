"""An optimiser's step and the averages of the weights in one pass over them on a GPU: each number is read once.

A table holds, for every stretch of CHUNK numbers, where it begins in each of the tensors that belong together: weights,
gradient, the two moments, the averages. One launch serves all of them.
"""

import math

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

CHUNK = 4096
SLOTS = 4  # averages at most


@triton.jit
def _at(table, slot: tl.constexpr, columns: tl.constexpr, wide: tl.constexpr, aligned: tl.constexpr):
    """Pointers to the numbers of this program's stretch in one of its tensors."""
    address = tl.load(table + tl.program_id(0).to(tl.int64) * columns + slot)
    if aligned:
        address = tl.multiple_of(address, 16)
    return address.to(tl.pointer_type(tl.float32)) + tl.arange(0, wide)


@triton.jit
def _inside(table, good, columns: tl.constexpr, wide: tl.constexpr):
    """Which numbers there are in this program's stretch; none if the step is not to be taken."""
    length = tl.load(table + tl.program_id(0).to(tl.int64) * columns + columns - 1)
    return tl.arange(0, wide) < tl.where(tl.load(good) != 0, length, 0)


@triton.jit
def _follow(
    table, w, mask, rate0, rate1, rate2, rate3,
    before: tl.constexpr, averages: tl.constexpr, aligned: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Each average towards the weights by its rate; `before` rows of the table are not averages."""
    columns: tl.constexpr = before + averages + 1
    for slot in tl.static_range(averages):
        place = _at(table, before + slot, columns, wide, aligned)
        a = tl.load(place, mask, 0.0)
        rate = rate0 if slot == 0 else rate1 if slot == 1 else rate2 if slot == 2 else rate3
        tl.store(place, a + rate * (w - a), mask)


@triton.jit
def _update_kernel(
    table, good, inverse_scale, fresh1, beta2, fresh2, first, second, eps, rate0, rate1, rate2, rate3,
    adapts: tl.constexpr, averages: tl.constexpr, aligned: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """w ← w − first · m / (second · √v + eps), or w − first · m where v is not to be trusted yet; then the averages.

    fresh1 and fresh2 are 1 − β: the difference of two float32 would be off by 1e-5 of itself for β2 = 0.999.
    """
    columns: tl.constexpr = 5 + averages
    mask = _inside(table, good, columns, wide)
    g = tl.load(_at(table, 1, columns, wide, aligned), mask, 0.0) * inverse_scale
    place = _at(table, 2, columns, wide, aligned)
    m = tl.load(place, mask, 0.0)
    m += fresh1 * (g - m)
    tl.store(place, m, mask)
    place = _at(table, 3, columns, wide, aligned)
    v = tl.load(place, mask, 0.0)
    v = beta2 * v + fresh2 * g * g
    tl.store(place, v, mask)
    place = _at(table, 0, columns, wide, aligned)
    w = tl.load(place, mask, 0.0)
    if adapts:
        w -= first * m / (second * tl.sqrt(v) + eps)
    else:
        w -= first * m
    tl.store(place, w, mask)
    _follow(table, w, mask, rate0, rate1, rate2, rate3, 4, averages, aligned, wide)


@triton.jit
def _move_kernel(
    table, good, lr, rate0, rate1, rate2, rate3,
    averages: tl.constexpr, aligned: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """w ← w − lr · step; then the averages."""
    columns: tl.constexpr = 3 + averages
    mask = _inside(table, good, columns, wide)
    step = tl.load(_at(table, 1, columns, wide, aligned), mask, 0.0)
    place = _at(table, 0, columns, wide, aligned)
    w = tl.load(place, mask, 0.0) - lr * step
    tl.store(place, w, mask)
    _follow(table, w, mask, rate0, rate1, rate2, rate3, 2, averages, aligned, wide)


def radam_factors(step: int, *, lr: float, beta1: float, beta2: float, eps: float) -> tuple[float, float, bool]:
    """What RAdam multiplies m with and √v with at update number `step` (from 1), and whether it uses v yet."""
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * beta2**step / bias2
    if length <= 5:
        return lr / bias1, 0.0, False
    rect = math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
    return lr * rect * math.sqrt(bias2) / bias1, 1.0, True


class Table:
    """Where the numbers of parallel rows of tensors lie; made anew when one of them has moved."""

    def __init__(self) -> None:
        self.pointers: list[list[int]] = []

    def find(self, rows: list[list[Tensor]]) -> None:
        """Fill `places`, int64 [stretches, rows + 1]; `aligned` is whether all begin at a multiple of 16 bytes."""
        pointers = [[tensor.data_ptr() for tensor in row] for row in rows]
        if pointers != self.pointers:
            check(rows)
            sizes = torch.tensor([tensor.numel() for tensor in rows[0]])
            counts = -(-sizes // CHUNK)
            owner = torch.repeat_interleave(torch.arange(len(sizes)), counts)
            start = (torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]) * CHUNK
            addresses = torch.tensor(pointers).T[owner] + 4 * start[:, None]
            self.aligned = bool((addresses % 16 == 0).all())
            lengths = (sizes[owner] - start).clamp(max=CHUNK)
            self.places = torch.cat((addresses, lengths[:, None]), dim=1).to(rows[0][0].device)
            self.pointers = pointers


def check(rows: list[list[Tensor]]) -> None:
    """All that belongs together lies in the same order in memory, as float32 without gaps."""
    for together in zip(*rows, strict=True):
        first = together[0]
        for tensor in together:
            assert tensor.dtype == torch.float32 and tensor.shape == first.shape
            assert tensor.stride() == first.stride() or (tensor.is_contiguous() and first.is_contiguous())
        assert dense(first)


def dense(tensor: Tensor) -> bool:
    """Whether a tensor has no gaps, in whatever order its dimensions lie."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def update(
    table: Table, good: Tensor, *, step: int, lr: float, betas: tuple[float, float], eps: float, scale: float,
    rates: list[float],
) -> None:  # fmt: skip
    """One update by RAdam of all weights, and of each average towards them by its rate; none if `good` (int32) is 0."""
    first, second, adapts = radam_factors(step, lr=lr, beta1=betas[0], beta2=betas[1], eps=eps)
    _update_kernel[(len(table.places),)](
        table.places, good, 1 / scale, 1 - betas[0], betas[1], 1 - betas[1], first, second, eps, *slots(rates),
        adapts=adapts, averages=len(rates), aligned=table.aligned, wide=CHUNK, num_warps=8,
    )  # fmt: skip


def move(table: Table, good: Tensor, *, lr: float, rates: list[float]) -> None:
    """All weights against their steps, and each average towards them by its rate; none if `good` (int32) is 0."""
    _move_kernel[(len(table.places),)](
        table.places, good, lr, *slots(rates), averages=len(rates), aligned=table.aligned, wide=CHUNK, num_warps=8
    )


def slots(rates: list[float]) -> list[float]:
    assert len(rates) <= SLOTS
    return [*rates, *[0.0] * (SLOTS - len(rates))]
