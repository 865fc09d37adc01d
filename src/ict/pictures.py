"""Batches of images as one picture, and pictures as PNG bytes."""

import io
import math

from PIL import Image
from torch import Tensor

from ict.config import require
from ict.data import to_uint8

GROUND = 24  # grey between the tiles


def grid(images: Tensor, *, columns: int | None = None, scale: int = 1, gap: int = 2) -> Image.Image:
    """A contact sheet of images in [-1, 1], or of uint8 pixels, row by row, each enlarged `scale` times (bicubic)."""
    pixels = to_uint8(images) if images.is_floating_point() else images
    count, height, width = len(pixels), pixels.shape[2] * scale, pixels.shape[3] * scale
    columns = min(count, columns or math.ceil(math.sqrt(count)))
    rows = -(-count // columns)
    area = columns * (width + gap) * rows * (height + gap)
    require(area <= 2**28, f"a sheet of {area:,} pixels is too large: lower the scale or the number of images")
    tiles = [to_picture(one, scale=scale) for one in pixels]
    ground = GROUND if tiles[0].mode == "L" else (GROUND,) * 3
    sheet = Image.new(tiles[0].mode, (columns * (width + gap) - gap, rows * (height + gap) - gap), ground)
    for i, tile in enumerate(tiles):
        sheet.paste(tile, (i % columns * (width + gap), i // columns * (height + gap)))
    return sheet


def to_picture(pixels: Tensor, *, scale: int = 1) -> Image.Image:
    """uint8 [C, H, W] -> a picture."""
    array = pixels.permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    size = (picture.width * scale, picture.height * scale)
    return picture if scale == 1 else picture.resize(size, Image.Resampling.BICUBIC)


def comfortable_scale(image_size: int, *, tile: int = 48) -> int:
    """How much to enlarge small images so that they can be read."""
    return max(1, tile // image_size)


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
