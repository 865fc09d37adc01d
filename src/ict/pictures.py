"""Batches of images as one picture, and pictures as PNG bytes."""

import io
import math
from collections.abc import Mapping, Sequence

import torch
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from ict.config import POINTS
from ict.pixels import to_float, to_uint8
from ict.reading import require

GROUND = 24  # grey between the tiles
PAPER, INK = (255, 255, 255), (40, 40, 40)


def grid(images: Tensor, *, columns: int | None = None, scale: int = 1, gap: int = 2) -> Image.Image:
    """A contact sheet of images in [-1, 1], or of uint8 pixels, row by row, each enlarged `scale` times (bicubic).

    Points of the plane are drawn all in one.
    """
    if is_points(images.shape):
        return scatter(images if images.is_floating_point() else to_float(images))
    pixels = to_uint8(images) if images.is_floating_point() else images
    height, width = pixels.shape[2] * scale, pixels.shape[3] * scale
    columns, rows = sheet_shape(len(pixels), (height, width), columns=columns, gap=gap)
    tiles = [to_picture(one, scale=scale) for one in pixels]
    ground = GROUND if tiles[0].mode == "L" else (GROUND,) * 3
    sheet = Image.new(tiles[0].mode, (columns * (width + gap) - gap, rows * (height + gap) - gap), ground)
    for i, tile in enumerate(tiles):
        sheet.paste(tile, (i % columns * (width + gap), i // columns * (height + gap)))
    return sheet


def sheet_shape(count: int, tile: tuple[int, int], *, columns: int | None = None, gap: int = 2) -> tuple[int, int]:
    """Columns and rows of a sheet of so many tiles, which must not be too large."""
    columns = min(count, columns or math.ceil(math.sqrt(count)))
    rows = -(-count // columns)
    area = columns * (tile[1] + gap) * rows * (tile[0] + gap)
    require(area <= 2**28, f"a sheet of {area:,} pixels is too large: lower the scale or the number of images")
    return columns, rows


def to_picture(pixels: Tensor, *, scale: int = 1) -> Image.Image:
    """uint8 [C, H, W] -> a picture."""
    array = pixels.permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    size = (picture.width * scale, picture.height * scale)
    return picture if scale == 1 else picture.resize(size, Image.Resampling.BICUBIC)


def comfortable_scale(image_size: int, *, tile: int = 48) -> int:
    """How much to enlarge small images so that they can be read; points are not enlarged."""
    return 1 if image_size == POINTS[0] else max(1, tile // image_size)


def is_points(shape: Sequence[int]) -> bool:
    """Whether [..., C, H, W] are points of the plane, not images."""
    return (shape[-1], shape[-3]) == POINTS


def enough(image_size: int, usual: int) -> int:
    """How many samples show what a model does: the usual number of images, but many points."""
    return 2000 if image_size == POINTS[0] else usual


def scatter(points: Tensor, colour: Tensor | None = None, *, to: Tensor | None = None, side: int = 320) -> Image.Image:
    """Points [n, 2] (or [n, 2, 1, 1]) of [-1, 1]², in colours [3, n] in [0, 1]; with lines from each to another."""
    fine = 3  # drawn larger, then made smaller: smooth edges
    sheet = Image.new("RGB", (fine * side, fine * side), PAPER)
    pen = ImageDraw.Draw(sheet, "RGBA")
    middle, unit = fine * side / 2, fine * side / 2 / 1.05
    for place in (-1, 0, 1):
        at = middle + place * unit
        pen.line(((at, 0), (at, 2 * middle)), fill=(*INK, 40), width=fine)
        pen.line(((0, at), (2 * middle, at)), fill=(*INK, 40), width=fine)
    flip = torch.tensor([1.0, -1.0])
    starts, ends = (middle + unit * flip * each.detach().cpu().float().reshape(-1, 2)
                    for each in (points, points if to is None else to))  # fmt: skip
    shades = torch.zeros(3, len(starts)) + 0.3 if colour is None else colour
    radius = 1.3 * fine
    for (x, y), (x2, y2), shade in zip(starts.tolist(), ends.tolist(), shades.T.tolist(), strict=True):
        ink = (*(round(255 * one) for one in shade), 150)
        if to is None:
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
        else:
            pen.line(((x, y), (x2, y2)), fill=ink, width=fine)
    return sheet.resize((side, side), Image.Resampling.LANCZOS)


def colours(angle: Tensor) -> Tensor:
    """A colour for each angle -> [3, ...] in [0, 1], round the circle of hues."""
    thirds = torch.tensor([0.0, 2.0, 4.0], dtype=angle.dtype) * math.pi / 3
    return 0.5 + 0.42 * torch.cos(angle - thirds.reshape(3, *[1] * angle.ndim))


def png(picture: Image.Image, *, text: Mapping[str, object] | None = None) -> bytes:
    """The bytes of a PNG file, with some words in its header."""
    buffer, info = io.BytesIO(), PngInfo()
    for key, value in (text or {}).items():
        info.add_text(key, str(value))
    picture.save(buffer, "PNG", optimize=True, pnginfo=info)
    return buffer.getvalue()
