"""The U-Net that the small net and ADM share, and the small net: for images from 8 to 64 pixels.

x [B, C, H, W] ─► convolution ─► levels down ─► middle ─► levels up, joined with their twins ─► norm, convolution
c_noise [B] ─► Fourier or positional embedding ─► two dense layers, + class embedding ─► every block
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from ict.config import NetConfig
from ict.nets.dropout import number_dropouts
from ict.nets.embeddings import EMBEDDINGS
from ict.nets.layers import Attention, ResidualBlock, Stage, Style, double, group_norm
from ict.precision import exact
from ict.reading import choose, require


class Downsample(nn.Module):
    """A convolution of stride 2."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor, embedding: Tensor, key: Tensor | None) -> Tensor:
        return self.conv(x)


class Upsample(nn.Module):
    """Each pixel four times, then a convolution."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, embedding: Tensor, key: Tensor | None) -> Tensor:
        return self.conv(double(x))


class Embedding(nn.Module):
    """c_noise and label -> the vector that every block gets, through its last SiLU.

    A net with intervals is given c_noise as [B, 2]: where it is, and how far it shall go.
    """

    def __init__(self, config: NetConfig, *, width: int, classes: int, start: Callable[[nn.Module], nn.Module]):
        super().__init__()
        size = 4 * config.channels
        self.noise = choose("net.embedding", config.embedding, EMBEDDINGS)(width, config)
        self.dense1, self.dense2 = start(nn.Linear(width, size)), start(nn.Linear(size, size))
        self.label = nn.Embedding(classes, size) if classes else None
        self.interval = start(nn.Linear(width, size, bias=False)) if config.intervals else None

    def forward(self, c_noise: Tensor, label: Tensor | None) -> Tensor:
        with exact(c_noise):
            if self.interval is None:
                embedding = self.dense1(self.noise(c_noise))
            else:
                embedding = self.dense1(self.noise(c_noise[:, 0])) + self.interval(self.noise(c_noise[:, 1]))
            embedding = self.dense2(F.silu(embedding))
            if self.label is not None:
                if label is None:
                    raise ValueError("this net was built with class labels: pass label=…, one class number a sample")
                embedding = embedding + self.label(label)
            return F.silu(embedding)


class UNet(nn.Module):
    """F(x, c_noise, label, key); the last convolution starts at zero, so F starts as 0.

    Subclasses say how it resamples, how wide the noise embedding is, and whether the middle always attends.
    """

    def __init__(self, config: NetConfig, *, image_size: int, channels: int, classes: int):
        super().__init__()
        check_size(config, image_size)
        self.config, self.style = config, self.make_style(config)
        width = config.channels
        self.embed = Embedding(config, width=self.embedding_width(), classes=classes, start=self.style.start)

        current, size = config.multipliers[0] * width, image_size
        self.conv_in = nn.Conv2d(channels, current, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips = [current]
        for level, multiplier in enumerate(config.multipliers):
            if level:
                self.down.append(self.downsample(current, size))
                size //= 2
                skips.append(current)
            for _ in range(config.blocks):
                self.down.append(self.stage(current, multiplier * width, size))
                current = multiplier * width
                skips.append(current)
        self.middle = nn.ModuleList(
            [
                self.stage(current, current, size, attend=self.middle_attends()),
                self.stage(current, current, size, attend=False),
            ]
        )
        for level, multiplier in reversed(list(enumerate(config.multipliers))):
            for _ in range(config.blocks + 1):
                self.up.append(self.stage(current + skips.pop(), multiplier * width, size))
                current = multiplier * width
            if level:
                self.up.append(self.upsample(current, size))
                size *= 2
        assert not skips
        self.norm_out = self.style.norm(current)
        self.conv_out = self.style.end(nn.Conv2d(current, channels, 3, padding=1))
        number_dropouts(self)

    def make_style(self, config: NetConfig) -> Style:
        return Style(norm=group_norm)

    def embedding_width(self) -> int:
        return 2 * self.config.channels

    def middle_attends(self) -> bool:
        return bool(self.config.attention)

    def downsample(self, channels: int, size: int) -> nn.Module:
        """From `size` pixels to half of them."""
        return Downsample(channels)

    def upsample(self, channels: int, size: int) -> nn.Module:
        """From `size` pixels to twice as many."""
        return Upsample(channels)

    def block(self, inputs: int, outputs: int, size: int, resample: nn.Module | None = None) -> ResidualBlock:
        """A block whose inner feature map has `size` pixels."""
        width, dropout = 4 * self.config.channels, self.config.dropout_at(size)
        return ResidualBlock(inputs, outputs, width, dropout=dropout, style=self.style, resample=resample)

    def stage(self, inputs: int, outputs: int, size: int, *, attend: bool | None = None) -> Stage:
        attend = size in self.config.attention if attend is None else attend
        attention = Attention(outputs, head_channels=self.config.head_channels, style=self.style) if attend else None
        return Stage(self.block(inputs, outputs, size), attention)

    def forward(self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        embedding = self.embed(c_noise, label)
        x = self.conv_in(x)
        skips = [x]
        for layer in self.down:
            x = layer(x, embedding, key)
            skips.append(x)
        for layer in self.middle:
            x = layer(x, embedding, key)
        for layer in self.up:
            x = layer(x, embedding, key, skips.pop()) if isinstance(layer, Stage) else layer(x, embedding, key)
        return self.conv_out(self.norm_out(x, silu=True))


def check_size(config: NetConfig, image_size: int) -> None:
    """Every level but the last halves the image, so its size must be divisible that often."""
    halvings = len(config.multipliers) - 1
    require(
        image_size % 2**halvings == 0 and image_size >> halvings >= 2,
        f"data.image_size = {image_size} cannot be halved {halvings} times, once between two net.multipliers; "
        f"use a multiple of {2**halvings} that leaves 2 pixels or more, or fewer multipliers",
    )
    sizes = [image_size >> level for level in range(halvings + 1)]
    for size in config.attention:
        require(
            size in sizes,
            f"net.attention asks for feature maps of {size} pixels, but this net has {', '.join(map(str, sizes))}",
        )
