"""Layers that every net here is built from.

Shapes: B samples, C channels, H × W pixels; a key is one 32-bit integer a sample, held in int32.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Dropout(nn.Module):
    """Dropout whose mask is a function of (key of the sample, this layer, element).

    Student and teacher are given the same keys and so the same masks (§3.1), with no generator to save and restore:
    that holds on a CPU, on a GPU, under `torch.compile`, and however a batch is cut among ranks.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.salt = 0  # number_dropouts gives each layer of a net its own

    def forward(self, x: Tensor, key: Tensor | None) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if key is None:
            raise ValueError(
                "a net with dropout needs a key for each sample in training mode: pass key=… or call .eval()"
            )
        kept = dropout_mask(x.shape, key, p=self.p, salt=self.salt)
        return torch.where(kept, x * (1 / (1 - self.p)), 0)


def dropout_mask(shape: torch.Size, key: Tensor, *, p: float, salt: int) -> Tensor:
    """True where an element is kept -> bool of `shape`; a 32-bit integer hash of (key, salt, element)."""
    elements = torch.arange(shape[1:].numel(), device=key.device, dtype=torch.int32).reshape(1, *shape[1:])
    keys = _mix(key.to(torch.int32) ^ _signed(_GOLDEN * (salt + 1))).reshape(-1, *[1] * (len(shape) - 1))
    # Both sides are mixed before they meet: a plain product of `arange` would be folded by torch.compile into an index
    # expression that leaves int32, and a plain xor would make the masks of some samples permutations of each other.
    return (_mix(_mix(elements) ^ keys) & 0xFFFFFF) >= round(p * 2**24)


_GOLDEN = 0x9E3779B9


def _mix(x: Tensor) -> Tensor:
    """An avalanche over 32 bits (constants of Wellons' search for low bias); int32 arithmetic wraps."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _signed(0x7FEB352D)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word


def number_dropouts(net: nn.Module) -> None:
    """Give every dropout layer of a net its own salt, by position."""
    for number, layer in enumerate(m for m in net.modules() if isinstance(m, Dropout)):
        layer.salt = number


def zero_(module: nn.Module) -> nn.Module:
    """Set a layer's weights to zero, so that the branch it ends starts as nothing."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm of at most 32 groups of at least 4 channels."""
    groups = min(32, channels // 4)
    while channels % groups:
        groups -= 1
    return nn.GroupNorm(groups, channels, eps=1e-6)


class ResidualBlock(nn.Module):
    """Norm, SiLU, convolution, twice; the noise and class embedding comes in between, dropout before the second."""

    def __init__(self, inputs: int, outputs: int, embedding: int, *, dropout: float):
        super().__init__()
        self.norm1, self.conv1 = group_norm(inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.embed = nn.Linear(embedding, outputs)
        self.norm2, self.dropout = group_norm(outputs), Dropout(dropout)
        self.conv2 = zero_(nn.Conv2d(outputs, outputs, 3, padding=1))
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, embedding: Tensor, key: Tensor | None) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.embed(embedding)[:, :, None, None]
        h = self.conv2(self.dropout(F.silu(self.norm2(h)), key))
        return self.skip(x) + h


class Attention(nn.Module):
    """Self-attention over the pixels of a feature map, with a residual connection."""

    def __init__(self, channels: int, *, head_channels: int):
        super().__init__()
        self.heads = max(1, channels // head_channels)
        self.norm = group_norm(channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = zero_(nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, c, height, width = x.shape
        qkv = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, height * width)
        q, k, v = qkv.transpose(-1, -2).unbind(1)  # [B, heads, pixels, channels of a head]
        h = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(h.transpose(-1, -2).reshape(b, c, height, width))
