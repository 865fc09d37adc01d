"""A set of images in memory, and the two scales a pixel lives on: uint8 [0, 255] and float32 [-1, 1]."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Images:
    """uint8 [n, C, H, W], with class numbers [n] and the classes' names."""

    pixels: Tensor
    labels: Tensor
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.pixels.dtype == torch.uint8
        assert self.pixels.ndim == 4
        assert len(self.pixels) == len(self.labels) > 0

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.pixels.shape[1:]
        return channels, height, width

    def describe(self) -> str:
        channels, height, width = self.shape
        return f"{height}×{width} pixels, {'grey' if channels == 1 else 'colour'}"

    def to(self, device: torch.device) -> "Images":
        return Images(pixels=self.pixels.to(device), labels=self.labels.to(device), class_names=self.class_names)


def to_float(pixels: Tensor) -> Tensor:
    """uint8 [0, 255] -> float32 [-1, 1]."""
    return pixels.to(torch.float32) / 127.5 - 1


def to_uint8(images: Tensor) -> Tensor:
    """float [-1, 1] -> uint8 [0, 255], rounded; what lies outside is clipped."""
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
