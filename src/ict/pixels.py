"""Images as they are stored, uint8 in [0, 255], and as nets see them, float32 in [-1, 1]."""

import torch
from torch import Tensor


def to_float(pixels: Tensor) -> Tensor:
    """uint8 [0, 255] -> float32 [-1, 1]."""
    return pixels.to(torch.float32) / 127.5 - 1


def to_uint8(images: Tensor) -> Tensor:
    """float [-1, 1] -> uint8 [0, 255], rounded; what lies outside is clipped."""
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
