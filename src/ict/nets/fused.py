"""Kernels for feature maps in channels_last on a GPU: the FIR filter, and the sum of two paths. See fused_norm.py.

Triton comes with torch's builds for NVIDIA GPUs.
"""

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor
from torch.autograd.function import once_differentiable

PIXELS = 256  # that one program sums


def tile(x: Tensor) -> tuple[int, int, int, int, int]:
    """Samples, pixels and channels of x [B, H, W, C], and the pixels and channels of a tile."""
    samples, height, width, channels = x.shape
    wide = min(64, triton.next_power_of_2(channels))
    return samples, height * width, channels, max(1, min(64, 4096 // wide)), wide


@triton.jit
def _places(pixels, channels, tall: tl.constexpr, wide: tl.constexpr):
    """This program's pixels, its channels, and where its sample begins."""
    return (
        tl.program_id(1) * tall + tl.arange(0, tall),
        tl.program_id(2) * wide + tl.arange(0, wide),
        tl.program_id(0).to(tl.int64) * pixels * channels,
    )


# --- the filters [1, 3, 3, 1] and [1, 1] in both directions


@triton.jit
def _fir_kernel(
    x, y, old_height, old_width, height, width, channels, gain, taps: tl.constexpr,
    up: tl.constexpr, down: tl.constexpr, padding: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """y[o] = Σ tap[i] x[(o · down + i − padding) / up], where that is a whole place inside; the taps are 1, 3, 3, 1, or
    1, 1."""
    pixel, channel, base = _places(height * width, channels, tall, wide)
    inside = channel < channels
    row, column = pixel // width, pixel % width
    source = tl.program_id(0).to(tl.int64) * old_height * old_width * channels
    total = tl.zeros([tall, wide], tl.float32)
    for i in tl.static_range(taps):
        h = row * down + i - padding
        rows_inside = (h >= 0) & (h % up == 0) & (h // up < old_height) & (pixel < height * width)
        for j in tl.static_range(taps):
            w = column * down + j - padding
            mask = (rows_inside & (w >= 0) & (w % up == 0) & (w // up < old_width))[:, None] & inside[None, :]
            place = ((h // up) * old_width + w // up)[:, None] * channels + channel[None, :]
            tap = (1 + 2 * (i % 3 > 0)) * (1 + 2 * (j % 3 > 0)) if taps == 4 else 1
            total += tl.load(x + source + place, mask, 0.0).to(tl.float32) * tap
    mask = (pixel < height * width)[:, None] & inside[None, :]
    tl.store(y + base + pixel[:, None] * channels + channel[None, :], (total * gain).to(y.dtype.element_ty), mask)


class _Fir(torch.autograd.Function):
    """x [B, H, W, C], contiguous."""

    @staticmethod
    def forward(
        ctx, x: Tensor, size: tuple[int, int], taps: int, up: int, down: int, padding: int, gain: float
    ) -> Tensor:
        y = torch.empty(x.shape[0], *size, x.shape[3], dtype=x.dtype, device=x.device)
        samples, pixels, channels, tall, wide = tile(y)
        _fir_kernel[samples, triton.cdiv(pixels, tall), triton.cdiv(channels, wide)](
            x, y, *x.shape[1:3], *size, channels, gain,
            taps=taps, up=up, down=down, padding=padding, tall=tall, wide=wide,
        )  # fmt: skip
        ctx.size, ctx.options = tuple(x.shape[1:3]), (taps, down, up, taps - 1 - padding, gain)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore
        return _Fir.apply(dy.contiguous(), ctx.size, *ctx.options), *[None] * 6


def fir(x: Tensor, *, up: int, down: int, padding: int) -> Tensor:
    """x [B, C, H, W] -> blurred, halved or doubled, in channels_last: as a depthwise convolution (transposed where up
    is more than 1) of stride down (or up) and this padding does it. The gain is up²."""
    height, width = (n * up if up > 1 else (n + 2 * padding - 4) // down + 1 for n in x.shape[2:])
    placed = 3 - padding if up > 1 else padding
    y = _Fir.apply(x.permute(0, 2, 3, 1).contiguous(), (height, width), 4, up, down, placed, up**2 / 64)
    return y.permute(0, 3, 1, 2)


def box_up(x: Tensor) -> Tensor:
    """Each pixel four times."""
    size = 2 * x.shape[2], 2 * x.shape[3]
    return _Fir.apply(x.permute(0, 2, 3, 1).contiguous(), size, 2, 2, 1, 1, 1.0).permute(0, 3, 1, 2)


def box_down(x: Tensor) -> Tensor:
    """The mean of each 2×2 pixels."""
    size = x.shape[2] // 2, x.shape[3] // 2
    return _Fir.apply(x.permute(0, 2, 3, 1).contiguous(), size, 2, 1, 2, 0, 0.25).permute(0, 3, 1, 2)


# --- the sum of two paths


@triton.jit
def _joined(x, other, y, place, mask, bias, scale):
    """(x + other + bias) · scale at some places, rounded as y will hold it."""
    total = tl.load(x + place, mask, 0.0).to(tl.float32) + tl.load(other + place, mask, 0.0).to(tl.float32)
    return ((total + bias) * scale).to(y.dtype.element_ty)


@triton.jit
def _join_kernel(
    x, other, y, bias, first, second, scale, pixels, channels,
    span: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """(x + other + bias) · scale over span pixels; and Σ (y − y₀) and Σ (y − y₀)² of every channel, y₀ its first pixel,
    for the norm that comes next."""
    sample, channel = tl.program_id(0).to(tl.int64), tl.program_id(2) * wide + tl.arange(0, wide)
    inside, pixel = channel < channels, tl.program_id(1) * span + tl.arange(0, tall)
    base = sample * pixels * channels
    added = tl.load(bias + channel, inside, 0.0).to(tl.float32)
    centre = _joined(x, other, y, base + channel, inside, added, scale).to(tl.float32)
    one, two = tl.zeros([tall, wide], tl.float32), tl.zeros([tall, wide], tl.float32)
    for _ in range(span // tall):
        mask = (pixel < pixels)[:, None] & inside[None, :]
        place = base + pixel[:, None] * channels + channel[None, :]
        value = _joined(x, other, y, place, mask, added[None, :], scale)
        tl.store(y + place, value, mask)
        value = tl.where(mask, value.to(tl.float32) - centre[None, :], 0.0)
        one, two = one + value, two + value * value
        pixel += tall
    part = (sample * tl.num_programs(1) + tl.program_id(1)) * channels + channel
    tl.store(first + part, tl.sum(one, 0), inside)
    tl.store(second + part, tl.sum(two, 0), inside)


@triton.jit
def _join_back_kernel(
    dy, g, sums, scale, pixels, channels, scales: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr
):
    """g = dy · scale, and its sum over the pixels of one sample."""
    channel = tl.program_id(1) * wide + tl.arange(0, wide)
    inside, pixel = channel < channels, tl.arange(0, tall)
    sample = tl.program_id(0).to(tl.int64)
    total = tl.zeros([tall, wide], tl.float32)
    for _ in range(0, pixels, tall):
        mask = (pixel < pixels)[:, None] & inside[None, :]
        place = sample * pixels * channels + pixel[:, None] * channels + channel[None, :]
        value = tl.load(dy + place, mask, 0.0).to(tl.float32) * scale
        if scales:
            tl.store(g + place, value.to(g.dtype.element_ty), mask)
        total += value
        pixel += tall
    tl.store(sums + sample * channels + channel, tl.sum(total, 0), inside)


class _Join(torch.autograd.Function):
    """x and other [B, H, W, C], contiguous and of one kind; bias [C]."""

    @staticmethod
    def forward(ctx, x: Tensor, other: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(other)
        ctx.scale, ctx.kinds = scale, (x.dtype, other.dtype, bias.dtype)
        samples, pixels, channels, tall, wide = tile(x)
        parts = triton.cdiv(pixels, PIXELS)
        sums = torch.empty(2, samples, parts, channels, device=x.device)
        _join_kernel[samples, parts, triton.cdiv(channels, wide)](
            x, other, y, bias, sums[0], sums[1], scale, pixels, channels, span=PIXELS, tall=tall, wide=wide
        )
        ctx.mark_non_differentiable(sums)
        return y, sums

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor, _: Tensor | None):  # type: ignore
        (first, second, third), dy = ctx.kinds, dy.contiguous()
        samples, pixels, channels, tall, wide = tile(dy)
        sums = torch.empty(samples, channels, device=dy.device)
        g = dy if ctx.scale == 1 else torch.empty_like(dy)
        _join_back_kernel[samples, triton.cdiv(channels, wide)](
            dy, g, sums, ctx.scale, pixels, channels, scales=ctx.scale != 1, tall=tall, wide=wide
        )
        return g.to(first), g.to(second), add_rows(sums).to(third), None


def add_rows(rows: Tensor) -> Tensor:
    """The sum over samples of float32 [B, n] -> [n]: as a product, which is faster than torch's sum here."""
    return (torch.ones(1, len(rows), device=rows.device) @ rows)[0]


def join(x: Tensor, other: Tensor, bias: Tensor, *, scale: float) -> Tensor:
    """(x + other + bias) · scale -> [B, C, H, W] in channels_last, of the kind that `other` has.

    The map remembers the sums that its norm will need.
    """
    paths = (each.permute(0, 2, 3, 1).contiguous() for each in (x, other))
    y, sums = _Join.apply(*paths, bias, scale)
    return remember(y.permute(0, 3, 1, 2), sums)


def remember(x: Tensor, sums: Tensor | None) -> Tensor:
    """Let a map carry its sums along: float32 [2, B, parts, C], see `_join_kernel`."""
    x._ict_sums = (sums, version_of(x))  # type: ignore
    return x


def recall(x: Tensor | None) -> Tensor | None:
    """What a map remembers, unless it has been changed since."""
    sums, version = getattr(x, "_ict_sums", (None, None))
    return sums if x is not None and version == version_of(x) else None


def version_of(x: Tensor) -> int:
    """How often a map has been changed in place; what was made for inference alone does not count it."""
    return 0 if x.is_inference() else x._version
