"""Layers that every net here is built from.

Shapes: B samples, C channels, H × W pixels. A key is one integer a sample that decides dropout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ict.nets.dropout import Dropout
from ict.nets.kernels import kernels_for
from ict.nets.norm import Norm
from ict.precision import exact
from ict.reading import require

HALVES = (torch.float16, torch.bfloat16)


def zero_(module: nn.Module) -> nn.Module:
    """Set a layer's weights to zero, so that the branch it ends starts as nothing."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def fan_average_(module: nn.Module, scale: float = 1.0) -> nn.Module:
    """Uniform weights of variance scale / mean(fan in, fan out), biases of zero: DDPM's and NCSN++'s start.

    NCSN++ writes 1e-10 where it means "begin as nothing".
    """
    assert isinstance(module, nn.Conv2d | nn.Linear)
    fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(module.weight)
    bound = (3 * max(scale, 1e-10) / ((fan_in + fan_out) / 2)) ** 0.5
    nn.init.uniform_(module.weight, -bound, bound)
    if module.bias is not None:
        nn.init.zeros_(module.bias)
    return module


def as_it_is(module: nn.Module) -> nn.Module:
    """Torch's own start."""
    return module


@dataclass(frozen=True, kw_only=True)
class Style:
    """What tells one family's blocks from another's."""

    norm: Callable[[int], Norm]
    start: Callable[[nn.Module], nn.Module] = as_it_is  # weights of inner layers
    end: Callable[[nn.Module], nn.Module] = zero_  # weights of the last layer of a residual branch
    attend: Callable[[nn.Module], nn.Module] = as_it_is  # weights of queries, keys and values
    skip_scale: float = 1.0  # of the sum of a block and its shortcut
    scale_shift: bool = False  # the embedding scales and shifts the second norm instead of being added before it
    project_resampled: bool = False  # a resampling block's shortcut has a 1×1 convolution even at equal width


def group_norm(channels: int) -> Norm:
    """GroupNorm of at most 32 groups of at least 4 channels."""
    groups = max(1, min(32, channels // 4))
    while channels % groups:
        groups -= 1
    return Norm(groups, channels, eps=1e-6)


class ResidualBlock(nn.Module):
    """Norm, SiLU, (resampling,) convolution, twice; the embedding comes in between, dropout before the second.

    The embedding of noise level and class arrives already through its SiLU.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        embedding: int,
        *,
        dropout: float,
        style: Style,
        resample: nn.Module | None = None,
    ):
        super().__init__()
        self.style, self.resample = style, resample
        self.norm1 = style.norm(inputs)
        self.conv1 = cast(nn.Conv2d, style.start(nn.Conv2d(inputs, outputs, 3, padding=1)))
        self.embed = style.start(nn.Linear(embedding, 2 * outputs if style.scale_shift else outputs))
        self.norm2, self.dropout = style.norm(outputs), Dropout(dropout)
        self.conv2 = cast(nn.Conv2d, style.end(nn.Conv2d(outputs, outputs, 3, padding=1)))
        projected = inputs != outputs or (resample is not None and style.project_resampled)
        self.skip = style.start(nn.Conv2d(inputs, outputs, 1)) if projected else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor, key: Tensor | None, other: Tensor | None = None) -> Tensor:
        """x [B, C, H, W], or x and other whose channels follow each other."""
        h, x, other = self.norm1.past(x, other, silu=True)
        if self.resample is not None:
            h, x = self.resample(h), self.resample(x)
        h, bias = F.conv2d(h, self.conv1.weight, padding=1), self.conv1.bias
        with exact(embedding):
            e = self.embed(embedding)
        if self.style.scale_shift:
            scale, shift = e.chunk(2, dim=1)
            h = self.norm2(h, added=bias, scale=scale, shift=shift, silu=True, dropout=self.dropout, key=key)
        else:
            h = self.norm2(h, added=e + bias, silu=True, dropout=self.dropout, key=key)
        if kernels_for(h):
            return self.join(x, other, h)
        return (self.skip(x) + self.conv2(h)) * self.style.skip_scale

    def join(self, x: Tensor, other: Tensor | None, h: Tensor) -> Tensor:
        """The same sum of the two paths, with the biases of their last convolutions added on the way."""
        from ict.nets import fused

        h, bias = F.conv2d(h, self.conv2.weight, padding=1), self.conv2.bias
        assert bias is not None
        if isinstance(self.skip, nn.Conv2d):
            assert self.skip.bias is not None
            x, bias = project(x, other, self.skip.weight), bias + self.skip.bias
        return fused.join(x, h, bias, scale=self.style.skip_scale)


def pointwise(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """A 1×1 convolution; in half precision on a GPU as a product, which adds the bias on the way."""
    if not kernels_for(x) or x.dtype not in HALVES:
        return conv(x)
    return F.linear(x.permute(0, 2, 3, 1), conv.weight.flatten(1), conv.bias).permute(0, 3, 1, 2)


def project(x: Tensor, other: Tensor | None, weight: Tensor) -> Tensor:
    """A 1×1 convolution of x, or of x and other whose channels follow each other."""
    if other is None:
        return F.conv2d(x, weight)
    first, second = weight.split((x.shape[1], other.shape[1]), dim=1)
    x = F.conv2d(x, first)
    if x.dtype not in HALVES:
        return x + F.conv2d(other, second)
    b, c, height, width = x.shape
    rows, others = (each.permute(0, 2, 3, 1).flatten(0, 2) for each in (x, other))
    return torch.addmm(rows, others, second.flatten(1).t()).view(b, height, width, c).permute(0, 3, 1, 2)


class Attention(nn.Module):
    """Self-attention over the pixels of a feature map, with a residual connection."""

    def __init__(self, channels: int, *, head_channels: int, style: Style):
        super().__init__()
        self.heads = max(1, channels // (head_channels or channels))
        require(
            self.heads == 1 or channels % head_channels == 0,
            f"net.head_channels = {head_channels} does not divide the {channels} channels of a map that attends",
        )
        self.skip_scale = style.skip_scale
        self.norm = style.norm(channels)
        self.qkv = cast(nn.Conv2d, style.attend(nn.Conv2d(channels, 3 * channels, 1)))
        self.out = cast(nn.Conv2d, style.end(nn.Conv2d(channels, channels, 1)))

    def forward(self, x: Tensor) -> Tensor:
        b, c, height, width = x.shape
        h, x, _ = self.norm.past(x)
        # Pixels first: so all are views of a map in channels_last, and their gradients are one.
        qkv = pointwise(h, self.qkv).permute(0, 2, 3, 1).reshape(b, height * width, 3, self.heads, c // self.heads)
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))  # [B, heads, pixels, channels of a head]
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, height, width, c).permute(0, 3, 1, 2)
        if kernels_for(h):
            from ict.nets import fused

            assert self.out.bias is not None
            return fused.join(x, F.conv2d(h, self.out.weight), self.out.bias, scale=self.skip_scale)
        return (x + self.out(h)) * self.skip_scale


class Stage(nn.Module):
    """A residual block, and attention after it where asked."""

    def __init__(self, block: ResidualBlock, attention: Attention | None = None):
        super().__init__()
        self.block, self.attention = block, attention

    def forward(self, x: Tensor, embedding: Tensor, key: Tensor | None, other: Tensor | None = None) -> Tensor:
        x = self.block(x, embedding, key, other)
        return x if self.attention is None else self.attention(x)


# --- resampling


def double(x: Tensor) -> Tensor:
    """Each pixel four times, by `expand`: the gradient of `interpolate` is not the same twice on a GPU."""
    b, c, height, width = x.shape
    if kernels_for(x):
        from ict.nets import fused

        return fused.box_up(x)
    return x[:, :, :, None, :, None].expand(b, c, height, 2, width, 2).reshape(b, c, 2 * height, 2 * width)


class BoxUp(nn.Module):
    """Each pixel four times."""

    def forward(self, x: Tensor) -> Tensor:
        return double(x)


class BoxDown(nn.Module):
    """The mean of each 2×2 pixels."""

    def forward(self, x: Tensor) -> Tensor:
        if kernels_for(x):
            from ict.nets import fused

            return fused.box_down(x)
        return F.avg_pool2d(x, 2)


class Fir(nn.Module):
    """The filter [1, 3, 3, 1] in both directions, as a depthwise convolution: blurs, halves or doubles an image."""

    kernel: Tensor

    def __init__(self, *, up: int = 1, down: int = 1, padding: int = 1):
        super().__init__()
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0])
        self.up, self.down, self.padding = up, down, padding
        self.register_buffer("kernel", torch.outer(taps, taps) * (up**2 / 64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if kernels_for(x):
            from ict.nets import fused

            return fused.fir(x, up=self.up, down=self.down, padding=self.padding)
        channels = x.shape[1]
        kernel = self.kernel.to(x.dtype).expand(channels, 1, 4, 4)
        if self.up > 1:
            return F.conv_transpose2d(x, kernel, stride=self.up, padding=self.padding, groups=channels)
        return F.conv2d(x, kernel, stride=self.down, padding=self.padding, groups=channels)
