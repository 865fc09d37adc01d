"""NCSN++ (Song et al., 2021) as consistency models use it on CIFAR-10: the VE net with a residual input pyramid.

    x ─► convolution ─► [blocks ─► halving block ─► + pyramid]… ─► middle ─► [blocks ─► attention ─► doubling block]…
    └─► pyramid: FIR filter and convolution of stride 2, joined to the trunk at every level  ─► norm, convolution

Every sum of two paths is scaled by √½. On the way up a level attends once, after its blocks. With the Fourier or the
sinusoidal embedding and one head (`head_channels = 0`) this is the official net; `positional` is ADM's embedding.
"""

import functools
import math
from typing import cast

from torch import Tensor, nn

from ict.config import NetConfig
from ict.nets.dropout import number_dropouts
from ict.nets.layers import Attention, Fir, ResidualBlock, Stage, Style, fan_average_, group_norm
from ict.nets.unet import Embedding, check_size


def start_qkv_(module: nn.Module) -> nn.Module:
    """Queries, keys and values are three square maps that start on their own, with a scale of 0.1."""
    assert isinstance(module, nn.Conv2d)
    bound = math.sqrt(3 * 0.1 / module.in_channels)
    nn.init.uniform_(module.weight, -bound, bound)
    assert module.bias is not None
    nn.init.zeros_(module.bias)
    return module


STYLE = Style(
    norm=group_norm,
    start=fan_average_,
    end=functools.partial(fan_average_, scale=0.0),
    attend=start_qkv_,
    skip_scale=math.sqrt(0.5),
    project_resampled=True,
)


class PyramidStep(nn.Module):
    """Blur by the FIR filter, then a convolution of stride 2."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.blur, self.conv = Fir(padding=2), fan_average_(nn.Conv2d(inputs, outputs, 3, stride=2))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.blur(x))


class NCSNpp(nn.Module):
    """F(x, c_noise, label, key)."""

    def __init__(self, config: NetConfig, *, image_size: int, channels: int, classes: int):
        super().__init__()
        check_size(config, image_size)
        self.config = config
        width, last = config.channels, len(config.multipliers) - 1
        embedded = 2 * width if config.embedding == "fourier" else width
        self.embed = Embedding(config, width=embedded, classes=classes, start=fan_average_)

        current, size, pyramid = width, image_size, channels
        self.conv_in = fan_average_(nn.Conv2d(channels, width, 3, padding=1))
        self.down, self.shrink, self.pyramid = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        skips = [width]
        for level, multiplier in enumerate(config.multipliers):
            stages = nn.ModuleList()
            for _ in range(config.blocks):
                stages.append(Stage(self.block(current, multiplier * width, size), self.attention_at(size, multiplier)))
                current = multiplier * width
                skips.append(current)
            self.down.append(stages)
            if level < last:
                size //= 2
                self.shrink.append(self.block(current, current, size, Fir(down=2)))
                self.pyramid.append(PyramidStep(pyramid, current))
                pyramid = current
                skips.append(current)

        middle = Attention(current, head_channels=config.head_channels, style=STYLE)
        self.middle = nn.ModuleList(
            [Stage(self.block(current, current, size), middle), Stage(self.block(current, current, size))]
        )

        self.up, self.attend, self.grow = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for level, multiplier in reversed(list(enumerate(config.multipliers))):
            stages = nn.ModuleList()
            for _ in range(config.blocks + 1):
                stages.append(self.block(current + skips.pop(), multiplier * width, size))
                current = multiplier * width
            self.up.append(stages)
            self.attend.append(self.attention_at(size, multiplier) or nn.Identity())
            if level:
                size *= 2
                self.grow.append(self.block(current, current, size, Fir(up=2)))
        assert not skips
        self.norm_out, self.conv_out = group_norm(current), STYLE.end(nn.Conv2d(current, channels, 3, padding=1))
        number_dropouts(self)

    def block(self, inputs: int, outputs: int, size: int, resample: nn.Module | None = None) -> ResidualBlock:
        """A block whose inner feature map has `size` pixels."""
        return ResidualBlock(
            inputs,
            outputs,
            4 * self.config.channels,
            dropout=self.config.dropout_at(size),
            style=STYLE,
            resample=resample,
        )

    def attention_at(self, size: int, multiplier: int) -> Attention | None:
        if size not in self.config.attention:
            return None
        return Attention(multiplier * self.config.channels, head_channels=self.config.head_channels, style=STYLE)

    def forward(self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        embedding = self.embed(c_noise, label)
        h, pyramid = self.conv_in(x), x
        skips = [h]
        for level, stages in enumerate(self.down):
            for stage in cast(nn.ModuleList, stages):
                h = stage(h, embedding, key)
                skips.append(h)
            if level < len(self.shrink):
                h = self.shrink[level](h, embedding, key)
                h = pyramid = (self.pyramid[level](pyramid) + h) * STYLE.skip_scale
                skips.append(h)
        for stage in self.middle:
            h = stage(h, embedding, key)
        for level, blocks in enumerate(self.up):
            for block in cast(nn.ModuleList, blocks):
                h = block(h, embedding, key, skips.pop())
            h = self.attend[level](h)
            if level < len(self.grow):
                h = self.grow[level](h, embedding, key)
        return self.conv_out(self.norm_out(h, silu=True))
