"""GroupNorm with what stands around it, for feature maps in channels_last on a GPU: two passes over them each way.

    y = dropout(silu(w (x + a − mean) / deviation + b)), mean and deviation over a group of channels

w, b and a are one number a channel, or one a sample and channel. A first kernel sums every channel's pixels, a small
one turns the sums into a scale and a shift for each channel, and a third maps the pixels. So every size of group is
served alike, nothing is added in a changing order, and of all the steps between only x is kept for the way back, which
goes the same way.

x may be two maps whose channels follow each other, which saves joining them first; and it is handed on: the gradient of
what flows past the norm is added on the way back, where it costs no pass of its own.

Sums are in float32, about each channel's first pixel.
"""

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor
from torch.autograd.function import once_differentiable

from ict.nets.dropout import threshold
from ict.nets.fused import PIXELS, add_rows, recall, remember, tile


@triton.jit
def _slope(u, silu: tl.constexpr):
    """The derivative of silu at u."""
    if silu:
        s = tl.sigmoid(u)
        return s * (1 + u * (1 - s))
    else:
        return u * 0 + 1


@triton.jit
def _mix(x):
    """The hash of `dropout.py`, in int32 arithmetic that wraps."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def _kept(keys, pixel, channel, pixels, threshold, p):
    """What dropout multiplies each element of a tile with: 0 or 1 / (1 − p)."""
    element = _mix(channel[None, :] * pixels + pixel[:, None])
    word = _mix(element ^ tl.load(keys + tl.program_id(0)))
    return tl.where((word & 0xFFFFFF) >= threshold, 1 / (1 - p), 0.0)


@triton.jit
def _places(pixels, channels, whole, offset, span: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr):
    """This program's first pixels and its channels; where its sample begins in a map of `channels` channels, and where
    in one of `whole` from `offset` on; and where its row of [B, whole]."""
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(2) * wide + tl.arange(0, wide)
    return (
        tl.program_id(1) * span + tl.arange(0, tall),
        channel,
        sample * pixels * channels,
        sample * pixels * whole + offset,
        sample * whole + offset + channel,
    )


@triton.jit
def _sum_kernel(
    x, first, second, pixels, channels,
    span: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Σ (x − x₀) and Σ (x − x₀)² of every channel over span pixels, x₀ its first pixel."""
    pixel, channel, base, _, _ = _places(pixels, channels, channels, 0, span, tall, wide)
    inside = channel < channels
    centre = tl.load(x + base + channel, inside, 0.0).to(tl.float32)
    one, two = tl.zeros([tall, wide], tl.float32), tl.zeros([tall, wide], tl.float32)
    for _ in range(span // tall):
        mask = (pixel < pixels)[:, None] & inside[None, :]
        value = tl.load(x + base + pixel[:, None] * channels + channel[None, :], mask, 0.0).to(tl.float32)
        value = tl.where(mask, value - centre[None, :], 0.0)
        one, two = one + value, two + value * value
        pixel += tall
    part = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * channels + channel
    tl.store(first + part, tl.sum(one, 0), inside)
    tl.store(second + part, tl.sum(two, 0), inside)


@triton.jit
def _finish_kernel(
    x, other, sums, sums2, weight, bias, added, rows, weight_row, bias_row, added_row, parts, pixels, channels, split,
    size, eps, adds: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """From the sums of one sample and group: y = silu(scale x + shift), and what the way back needs of it."""
    sample, k = tl.program_id(0).to(tl.int64), tl.arange(0, wide)
    channel, inside = tl.program_id(1) * size + k, k < size
    early, late = inside & (channel < split), inside & (channel >= split)
    rest, samples = channels - split, tl.num_programs(0).to(tl.int64)
    one, two = tl.zeros([wide], tl.float32), tl.zeros([wide], tl.float32)
    for part in range(parts):
        here = (sample * parts + part) * split + channel
        there = (sample * parts + part) * rest + channel - split
        one += tl.load(sums + here, early, 0.0) + tl.load(sums2 + there, late, 0.0)
        here, there = here + samples * parts * split, there + samples * parts * rest
        two += tl.load(sums + here, early, 0.0) + tl.load(sums2 + there, late, 0.0)
    one, two = one / pixels, two / pixels
    a = tl.zeros([wide], tl.float32)
    if adds:
        a = tl.load(added + sample * added_row + channel, inside, 0.0)
    pixel = tl.load(x + sample * pixels * split + channel, early, 0.0).to(tl.float32)
    pixel += tl.load(other + sample * pixels * rest + channel - split, late, 0.0).to(tl.float32)
    centre = pixel + one + a  # of each channel
    mean = tl.sum(tl.where(inside, centre, 0.0), 0) / size
    spread = two - one * one + (centre - mean) * (centre - mean)
    rate = 1 / tl.sqrt(tl.sum(tl.where(inside, spread, 0.0), 0) / size + eps)
    scale = tl.load(weight + sample * weight_row + channel, inside, 0.0) * rate
    shift = tl.load(bias + sample * bias_row + channel, inside, 0.0) + scale * (a - mean)
    row, plane = rows + sample * channels + channel, tl.num_programs(0).to(tl.int64) * channels
    tl.store(row, scale, inside)
    tl.store(row + plane, shift, inside)
    tl.store(row + 2 * plane, mean - a, inside)
    tl.store(row + 3 * plane, centre - mean, inside)
    tl.store(row + 4 * plane, rate + a * 0, inside)


@triton.jit
def _finish_back_kernel(first, second, rows, grads, lines, parts, pixels, channels, size, wide: tl.constexpr):
    """From the sums of one sample and group: the gradients of weight, bias and added; and dx = scale g + bend (x −
    middle) + level."""
    sample, k = tl.program_id(0).to(tl.int64), tl.arange(0, wide)
    channel, inside = tl.program_id(1) * size + k, k < size
    dbias, moment = tl.zeros([wide], tl.float32), tl.zeros([wide], tl.float32)
    for part in range(parts):
        place = (sample * parts + part) * channels + channel
        dbias += tl.load(first + place, inside, 0.0)
        moment += tl.load(second + place, inside, 0.0)
    row, plane = sample * channels + channel, tl.num_programs(0).to(tl.int64) * channels
    scale, offset = tl.load(rows + row, inside, 0.0), tl.load(rows + row + 3 * plane, inside, 0.0)
    rate = tl.load(rows + row + 4 * plane, inside, 0.0)
    dweight = moment * rate
    level = -tl.sum(scale * dbias, 0) / (size * pixels)
    bend = -rate * (tl.sum(scale * dweight, 0) / (size * pixels))
    found = grads + sample * 3 * channels + channel
    tl.store(found, dweight, inside)
    tl.store(found + channels, dbias, inside)
    tl.store(found + 2 * channels, scale * dbias + pixels * (bend * offset + level), inside)
    tl.store(lines + row, bend, inside)
    tl.store(lines + row + plane, level + bend * 0, inside)


@triton.jit
def _map_kernel(
    x, y, scale, shift, keys, threshold, p, pixels, channels, whole, offset,
    silu: tl.constexpr, drops: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """silu(scale x + shift), with a scale and a shift for each sample and channel; then dropout."""
    pixel, channel, base, target, row = _places(pixels, channels, whole, offset, tall, tall, wide)
    inside = channel < channels
    mask = (pixel < pixels)[:, None] & inside[None, :]
    u = tl.load(x + base + pixel[:, None] * channels + channel[None, :], mask, 0.0).to(tl.float32)
    u = u * tl.load(scale + row, inside, 0.0)[None, :] + tl.load(shift + row, inside, 0.0)[None, :]
    if silu:
        u = u * tl.sigmoid(u)
    if drops:
        u *= _kept(keys, pixel, channel + offset, pixels, threshold, p)
    tl.store(y + target + pixel[:, None] * whole + channel[None, :], u.to(y.dtype.element_ty), mask)


@triton.jit
def _sum_back_kernel(
    x, dy, scale, shift, centre, keys, threshold, p, first, second, pixels, channels, whole, offset,
    silu: tl.constexpr, drops: tl.constexpr, span: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """With g the gradient before the silu: Σ g and Σ g (x − centre) of every channel over span pixels."""
    pixel, channel, base, source, row = _places(pixels, channels, whole, offset, span, tall, wide)
    inside = channel < channels
    a, b = tl.load(scale + row, inside, 0.0)[None, :], tl.load(shift + row, inside, 0.0)[None, :]
    middle = tl.load(centre + row, inside, 0.0)[None, :]
    one, two = tl.zeros([tall, wide], tl.float32), tl.zeros([tall, wide], tl.float32)
    for _ in range(span // tall):
        mask = (pixel < pixels)[:, None] & inside[None, :]
        value = tl.load(x + base + pixel[:, None] * channels + channel[None, :], mask, 0.0).to(tl.float32)
        g = tl.load(dy + source + pixel[:, None] * whole + channel[None, :], mask, 0.0).to(tl.float32)
        g *= _slope(a * value + b, silu)
        if drops:
            g *= _kept(keys, pixel, channel + offset, pixels, threshold, p)
        one, two = one + g, two + g * (value - middle)
        pixel += tall
    part = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * whole + offset + channel
    tl.store(first + part, tl.sum(one, 0), inside)
    tl.store(second + part, tl.sum(two, 0), inside)


@triton.jit
def _map_back_kernel(
    x, dy, extra, dx, scale, shift, centre, bend, level, keys, threshold, p, pixels, channels, whole, offset,
    silu: tl.constexpr, drops: tl.constexpr, more: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """dx = scale g + bend (x − centre) + level + extra."""
    pixel, channel, base, source, row = _places(pixels, channels, whole, offset, tall, tall, wide)
    inside = channel < channels
    mask = (pixel < pixels)[:, None] & inside[None, :]
    place = base + pixel[:, None] * channels + channel[None, :]
    value = tl.load(x + place, mask, 0.0).to(tl.float32)
    a, b = tl.load(scale + row, inside, 0.0)[None, :], tl.load(shift + row, inside, 0.0)[None, :]
    g = tl.load(dy + source + pixel[:, None] * whole + channel[None, :], mask, 0.0).to(tl.float32)
    g *= _slope(a * value + b, silu)
    if drops:
        g *= _kept(keys, pixel, channel + offset, pixels, threshold, p)
    value -= tl.load(centre + row, inside, 0.0)[None, :]
    out = a * g + tl.load(bend + row, inside, 0.0)[None, :] * value
    out += tl.load(level + row, inside, 0.0)[None, :]
    if more:
        out += tl.load(extra + place, mask, 0.0).to(tl.float32)
    tl.store(dx + place, out.to(dx.dtype.element_ty), mask)


def _parts(maps: list[Tensor]) -> list[tuple[Tensor, tuple[int, int, int, int], tuple[int, int, int], dict[str, int]]]:
    """For each map: itself, (pixels, channels, of all, before), its grid of tiles, and their shape."""
    whole, offset, found = sum(each.shape[3] for each in maps), 0, []
    for each in maps:
        samples, pixels, channels, tall, wide = tile(each)
        grid = (samples, triton.cdiv(pixels, tall), triton.cdiv(channels, wide))
        found.append((each, (pixels, channels, whole, offset), grid, {"tall": tall, "wide": wide}))
        offset += channels
    return found


def sums_of(x: Tensor) -> Tensor:
    """Σ (x − x₀) and Σ (x − x₀)² of every channel of x [B, H, W, C] -> float32 [2, B, parts, C]."""
    ((_, (pixels, channels, _, _), grid, shape),) = _parts([x])
    count = triton.cdiv(pixels, PIXELS)
    sums = torch.empty(2, len(x), count, channels, device=x.device)
    _sum_kernel[grid[0], count, grid[2]](x, sums[0], sums[1], pixels, channels, span=PIXELS, **shape)
    return sums


class _Norm(torch.autograd.Function):
    """x and other [B, H, W, C], contiguous; weight, bias and added float32 [C] or [B, C]. Gives y, x and other."""

    @staticmethod
    def forward(
        ctx, x: Tensor, other: Tensor | None, weight: Tensor, bias: Tensor, added: Tensor | None, keys: Tensor | None,
        sums: list[Tensor | None], groups: int, eps: float, silu: bool, p: float,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        maps, (samples, height, width, split) = [each for each in (x, other) if each is not None], x.shape
        channels = sum(each.shape[3] for each in maps)
        found = [sums_of(each) if known is None else known for each, known in zip(maps, sums, strict=False)]
        rows, size = torch.empty(5, samples, channels, device=x.device), channels // groups
        strides = [0 if each is None or each.ndim == 1 else channels for each in (weight, bias, added)]
        _finish_kernel[samples, groups](
            x, maps[-1], found[0], found[-1], weight, bias, bias if added is None else added, rows, *strides,
            found[0].shape[2], height * width, channels, split, size, eps, adds=added is not None,
            wide=triton.next_power_of_2(size),
        )  # fmt: skip
        y = torch.empty(samples, height, width, channels, dtype=x.dtype, device=x.device)
        drop = (x if keys is None else keys, threshold(p), p)
        for each, place, grid, shape in _parts(maps):
            _map_kernel[grid](
                each, y, rows[0], rows[1], *drop, *place, silu=silu, drops=keys is not None, **shape
            )  # fmt: skip
        ctx.save_for_backward(x, other, rows, keys)
        ctx.set_materialize_grads(False)
        ctx.groups, ctx.silu, ctx.p = groups, silu, p
        ctx.dims = weight.ndim, bias.ndim, 0 if added is None else added.ndim
        return y, x, other

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor | None, *past: Tensor | None):  # type: ignore
        if dy is None:  # only what flows past was used
            return *past, *[None] * 9
        x, other, rows, keys = ctx.saved_tensors
        maps = [each for each in (x, other) if each is not None]
        drop = (x if keys is None else keys, threshold(ctx.p), ctx.p)
        options = {"silu": ctx.silu, "drops": keys is not None}
        samples, height, width, _ = x.shape
        channels, dy = rows.shape[2], dy.contiguous()
        size = channels // ctx.groups
        count = triton.cdiv(height * width, PIXELS)
        first, second = torch.empty(2, samples, count, channels, device=x.device).unbind()
        for each, place, grid, shape in _parts(maps):
            _sum_back_kernel[samples, count, grid[2]](
                each, dy, rows[0], rows[1], rows[2], *drop, first, second, *place, **options, span=PIXELS, **shape
            )
        grads, lines = (
            torch.empty(shape, device=x.device) for shape in ((samples, 3, channels), (2, samples, channels))
        )
        _finish_back_kernel[samples, ctx.groups](
            first, second, rows, grads, lines, first.shape[1], height * width, channels, size,
            wide=triton.next_power_of_2(size),
        )  # fmt: skip
        found = []
        for (each, place, grid, shape), extra in zip(_parts(maps), past, strict=False):
            dx = torch.empty_like(each)
            _map_back_kernel[grid](
                each, dy, dy if extra is None else extra.contiguous(), dx, rows[0], rows[1], rows[2], lines[0],
                lines[1], *drop, *place, **options, more=extra is not None, **shape,
            )  # fmt: skip
            found.append(dx)
        summed = add_rows(grads.flatten(1)).view(3, channels) if 1 in ctx.dims else grads[0]
        others = ((None, summed[i], grads[:, i])[ndim] for i, ndim in enumerate(ctx.dims))
        return found[0], found[1] if other is not None else None, *others, *[None] * 6


def norm(
    x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None, *, groups: int, eps: float, silu: bool,
    keys: Tensor | None = None, p: float = 0.0, other: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """x [B, C, H, W] -> y in channels_last, and x and other again for what flows past; weight, bias and added are [C]
    or [B, C].

    With keys (int32 [B], from `Dropout.keys`) a share p of the elements is dropped.
    """
    rows = [None if each is None else each.float().contiguous() for each in (weight, bias, added)]
    maps = [None if each is None else each.permute(0, 2, 3, 1).contiguous() for each in (x, other)]
    sums = [recall(x), recall(other)]
    found = _Norm.apply(*maps, *rows, keys, sums, groups, eps, silu, p)
    y, past, past2 = (None if each is None else each.permute(0, 3, 1, 2) for each in found)
    assert y is not None and past is not None
    return y, remember(past, sums[0]), past2
