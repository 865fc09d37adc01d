"""A small U-Net for images from 8 to 64 pixels.

x [B, C, H, W] ─► convolution ─► levels down ─► middle ─► levels up, joined with their twins ─► norm, convolution
c_noise [B] ─► Fourier or positional embedding ─► two dense layers, + class embedding ─► every block
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ict.config import NetConfig, choose, require
from ict.nets.embeddings import EMBEDDINGS
from ict.nets.layers import Attention, ResidualBlock, group_norm, number_dropouts, zero_


class Stage(nn.Module):
    """A residual block, and attention after it where asked."""

    def __init__(self, block: ResidualBlock, attention: Attention | None):
        super().__init__()
        self.block, self.attention = block, attention

    def forward(self, x: Tensor, embedding: Tensor, key: Tensor | None) -> Tensor:
        x = self.block(x, embedding, key)
        return x if self.attention is None else self.attention(x)


class Downsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Upsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, height, width = x.shape
        # Each pixel four times, by `expand`: the gradient of `interpolate` is not the same twice on a GPU.
        x = x[:, :, :, None, :, None].expand(b, c, height, 2, width, 2).reshape(b, c, 2 * height, 2 * width)
        return self.conv(x)


class UNet(nn.Module):
    """F(x, c_noise, label, key); the last convolution starts at zero, so F starts as 0."""

    def __init__(self, config: NetConfig, *, image_size: int, channels: int, classes: int):
        super().__init__()
        check_size(config, image_size)
        width, embedding = config.channels, 4 * config.channels
        self.embed_noise = choose("net.embedding", config.embedding, EMBEDDINGS)(2 * width, config)
        self.dense1, self.dense2 = nn.Linear(2 * width, embedding), nn.Linear(embedding, embedding)
        self.embed_class = nn.Embedding(classes, embedding) if classes else None

        def stage(inputs: int, outputs: int, size: int, *, attention: bool | None = None) -> Stage:
            attend = size in config.attention if attention is None else attention
            return Stage(
                ResidualBlock(inputs, outputs, embedding, dropout=config.dropout),
                Attention(outputs, head_channels=config.head_channels) if attend else None,
            )

        self.conv_in = nn.Conv2d(channels, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        current, size, skips = width, image_size, [width]
        for level, multiplier in enumerate(config.multipliers):
            if level:
                self.down.append(Downsample(current))
                size //= 2
                skips.append(current)
            for _ in range(config.blocks):
                self.down.append(stage(current, multiplier * width, size))
                current = multiplier * width
                skips.append(current)
        self.middle = nn.ModuleList(
            [stage(current, current, size, attention=bool(config.attention)), stage(current, current, size)]
        )
        for level, multiplier in reversed(list(enumerate(config.multipliers))):
            for _ in range(config.blocks + 1):
                self.up.append(stage(current + skips.pop(), multiplier * width, size))
                current = multiplier * width
            if level:
                self.up.append(Upsample(current))
                size *= 2
        assert not skips
        self.norm_out, self.conv_out = group_norm(current), zero_(nn.Conv2d(current, channels, 3, padding=1))
        number_dropouts(self)

    def forward(self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        embedding = self.dense2(F.silu(self.dense1(self.embed_noise(c_noise))))
        if self.embed_class is not None:
            if label is None:
                raise ValueError("this net was built with class labels: pass label=…, one class number a sample")
            embedding = embedding + self.embed_class(label)
        embedding = F.silu(embedding)

        x = self.conv_in(x)
        skips = [x]
        for layer in self.down:
            x = layer(x, embedding, key) if isinstance(layer, Stage) else layer(x)
            skips.append(x)
        for layer in self.middle:
            x = layer(x, embedding, key)
        for layer in self.up:
            x = layer(torch.cat((x, skips.pop()), dim=1), embedding, key) if isinstance(layer, Stage) else layer(x)
        return self.conv_out(F.silu(self.norm_out(x)))


def check_size(config: NetConfig, image_size: int) -> None:
    """Every level but the last halves the image, so its size must be divisible that often."""
    halvings = len(config.multipliers) - 1
    require(
        image_size % 2**halvings == 0 and image_size >= 2**halvings,
        f"data.image_size = {image_size} cannot be halved {halvings} times, once between two net.multipliers; "
        f"use a multiple of {2**halvings}, or fewer multipliers",
    )
    sizes = [image_size >> level for level in range(halvings + 1)]
    for size in config.attention:
        require(
            size in sizes,
            f"net.attention asks for feature maps of {size} pixels, but this net has {', '.join(map(str, sizes))}",
        )
