"""Batches of images as one picture, and pictures as PNG bytes."""

import io
import math

import numpy as np
from PIL import Image
from torch import Tensor

from ict.data import to_uint8


def grid(images: Tensor, *, columns: int | None = None, scale: int = 1, gap: int = 2) -> Image.Image:
    """A contact sheet of images in [-1, 1], or of uint8 pixels, row by row; each pixel becomes scale × scale."""
    pixels = to_uint8(images) if images.is_floating_point() else images
    tiles = pixels.permute(0, 2, 3, 1).cpu().numpy().repeat(scale, axis=1).repeat(scale, axis=2)
    n, height, width, channels = tiles.shape
    columns = min(n, columns or math.ceil(math.sqrt(n)))
    rows = -(-n // columns)
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, channels), 255, dtype=np.uint8)
    for i, tile in enumerate(tiles):
        top, left = i // columns * (height + gap), i % columns * (width + gap)
        sheet[top : top + height, left : left + width] = tile
    return Image.fromarray(sheet[:, :, 0] if channels == 1 else sheet)


def comfortable_scale(image_size: int, *, tile: int = 48) -> int:
    """How often to repeat a pixel so that small images can be seen."""
    return max(1, tile // image_size)


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
