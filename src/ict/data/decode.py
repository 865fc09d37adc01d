"""The only place where untrusted bytes become pixels.

A file is refused, with its reason, rather than trusted: its size is bounded before it is read, its pixels before they
are decoded, and whatever a decoder throws becomes a reason, not a crash.
"""

import contextlib
import importlib
import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image, ImageOps

if TYPE_CHECKING:
    import numpy as np  # at run time only where it is used: a process that decodes should start at once

MAX_BYTES = 256 * 2**20  # of one file
MAX_PIXELS = 100_000_000  # of one image, before it is decoded
# What Pillow may open, as far as it was built with it: plain raster formats. Others start programs (EPS).
PLUGINS = ("Png", "Jpeg", "Mpo", "WebP", "Gif", "Bmp", "Tiff", "Ppm", "Tga", "Avif", "Jpeg2K")
for plugin in PLUGINS:
    with contextlib.suppress(ImportError):
        importlib.import_module(f"PIL.{plugin}ImagePlugin")
WANTED = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "TGA", "AVIF", "JPEG2000")
FORMATS = tuple(form for form in WANTED if form in Image.OPEN)
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".tga", ".avif", ".jp2",
           ".jfif", ".jpe", ".pnm", ".pbm", ".j2k", ".apng")  # fmt: skip

# Pillow warns of every odd tag of every file; what matters is raised.
warnings.filterwarnings("ignore", module=r"PIL\.")


class Refused(Exception):
    """An image that cannot be used; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What every image is made into."""

    size: int
    channels: int  # 1 or 3
    fit: str  # "crop" the centre square, or "pad" to a square
    background: int  # grey under transparent pixels and beside padded ones


def decode(data: "bytes | np.ndarray", target: Target) -> "np.ndarray":
    """The pixels of an image file, or of an array [H, W(, C)] -> uint8 [channels, size, size]; raises Refused."""
    import numpy as np

    planes, _ = decode_planes(data, target)
    return np.frombuffer(planes, dtype=np.uint8).reshape(target.channels, target.size, target.size)


def decode_planes(data: "bytes | np.ndarray", target: Target) -> tuple[bytes, tuple[int, int]]:
    """The same as bytes, plane after plane; and the width and height that the image had."""
    if len(data) == 0:
        raise Refused("empty file")
    try:
        if not isinstance(data, bytes):
            size = (data.shape[1], data.shape[0])
            if fits(data, target):
                return (data if target.channels == 1 else data.transpose(2, 0, 1)).tobytes(), size
            return to_planes(Image.fromarray(data), target), size
        if len(data) > MAX_BYTES:
            raise Refused(f"larger than {MAX_BYTES >> 20} MiB")
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            size = image.size
            return to_planes(image, target), size
    except Refused:
        raise
    except Image.UnidentifiedImageError:
        raise Refused("not an image of a known format") from None
    except Exception as error:  # a decoder may throw anything; none of it may stop the rest of the pile
        raise Refused(f"cannot be decoded: {type(error).__name__}: {str(error)[:200]}") from error


def fits(array: "np.ndarray", target: Target) -> bool:
    """Whether an array has the right size and channels already."""
    return array.shape == (target.size, target.size, 3)[: 3 if target.channels == 3 else 2]


def to_planes(image: Image.Image, target: Target) -> bytes:
    """The first frame: upright, opaque, in 8 bits, square, resized -> channels · size · size bytes."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise Refused(f"{width}×{height} pixels are more than {MAX_PIXELS:,}")
    if image.format == "JPEG" and "A" not in image.mode:  # decode no finer than twice what is needed
        image.draft(None, (2 * target.size, 2 * target.size))
    ImageOps.exif_transpose(image, in_place=True)
    picture = opaque(image, target).convert("L" if target.channels == 1 else "RGB")
    return b"".join(band.tobytes() for band in square(picture, target).split())


def opaque(image: Image.Image, target: Target) -> Image.Image:
    """Without transparency, and with 8 bits a channel."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        return scaled_to_8_bits(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, (target.background,) * 3 + (255,))
        return Image.alpha_composite(ground, image)
    return image


def scaled_to_8_bits(image: Image.Image) -> Image.Image:
    """16-bit grey by its upper byte; 32-bit and floating-point grey from 0 to 1, to 255, to 65535, or by its range."""
    import numpy as np

    values = np.asarray(image)
    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if not sixteen and not np.isfinite(values).all():
        raise Refused("pixels that are not finite numbers")
    low, high = 0.0, 65535.0
    if not sixteen:
        least, most = float(values.min()), float(values.max())
        tops = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
        fitting = [top for top in tops if least >= 0 and most <= top]
        low, high = (0.0, fitting[0]) if fitting else (least, max(most, least + 1))
    result = np.empty(values.shape, dtype=np.uint8)
    for row in range(0, len(values), 256):  # a large image in pieces: the sum of its copies should stay small
        result[row : row + 256] = np.rint((values[row : row + 256].astype(np.float64) - low) * (255 / (high - low)))
    return Image.fromarray(result)


def square(image: Image.Image, target: Target) -> Image.Image:
    """Cropped or padded to a square and resized (Lanczos)."""
    width, height = image.size
    size = (target.size, target.size)
    if target.fit == "crop":
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        return image.resize(size, Image.Resampling.LANCZOS, box=(left, top, left + side, top + side))
    ground = target.background if image.mode == "L" else (target.background,) * 3
    share = target.size / max(width, height)
    inner = (max(1, round(width * share)), max(1, round(height * share)))  # never nothing of a thin image
    padded = Image.new(image.mode, size, ground)
    place = ((target.size - inner[0]) // 2, (target.size - inner[1]) // 2)
    padded.paste(image.resize(inner, Image.Resampling.LANCZOS), place)
    return padded
