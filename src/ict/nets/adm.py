"""ADM (Dhariwal and Nichol, 2021) as the paper uses it on ImageNet 64×64: residual blocks also resample.

The scale-shift norm (AdaGN) is off unless asked for: it hurts consistency training (appendix B).
"""

import math

from torch import nn

from ict.config import NetConfig
from ict.nets.layers import BoxDown, BoxUp, Style
from ict.nets.norm import Norm
from ict.nets.unet import UNet


def norm32(channels: int) -> Norm:
    """GroupNorm of 32 groups (fewer where they do not divide the channels)."""
    return Norm(math.gcd(32, channels), channels)


class ADM(UNet):
    """The U-Net with ADM's blocks: the middle always attends, and the noise embedding is as wide as the net."""

    def make_style(self, config: NetConfig) -> Style:
        return Style(norm=norm32, scale_shift=config.scale_shift)

    def embedding_width(self) -> int:
        return self.config.channels

    def middle_attends(self) -> bool:
        return True

    def downsample(self, channels: int, size: int) -> nn.Module:
        return self.block(channels, channels, size // 2, BoxDown())

    def upsample(self, channels: int, size: int) -> nn.Module:
        return self.block(channels, channels, size * 2, BoxUp())
