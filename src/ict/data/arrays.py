"""Images in NumPy's .npy and .npz files, read block by block; a pickle inside is never opened."""

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from ict.data.archives import MAX_RATIO
from ict.data.pile import Entry, Listing, stamp_of
from ict.reading import ConfigError, require

BLOCK = 16 << 20  # bytes read at a time
MAX_LABELS = 256 << 20  # bytes
IMAGES = ("images", "data", "x", "x_train", "arr_0")  # names in an .npz, the first that is there
LABELS = ("labels", "label", "y", "y_train", "arr_1")


@dataclass(frozen=True, kw_only=True)
class Array:
    """uint8 images [n, H, W], [n, H, W, C] or [n, C, H, W]; of an .npz with labels [n] where they are there."""

    path: Path
    planes: tuple[int, int, int] | None = None  # how a flat image [C·H·W] is laid out

    def stamp(self) -> str:
        return stamp_of(self.path)

    def count(self) -> int | None:
        with self.opened() as (_, (count, *_), _):
            return count

    def entries(self) -> Listing:
        labels = self.labels()
        with self.opened() as (file, shape, arrange):
            require(
                labels is None or len(labels) == shape[0],
                f"{self.path}: {shape[0]:,} images, but {0 if labels is None else len(labels):,} labels",
            )
            place = 0
            for block in read_blocks(file, shape):
                for image in block:
                    label = "" if labels is None else str(labels[place])
                    yield Entry(f"{self.path.name}[{place}]", str(self.path), 0, None, label, arrange(image)), None
                    place += 1

    @contextmanager
    def opened(self) -> Iterator:
        """The stream of pixels, their shape, and a function that turns one image into [H, W] or [H, W, C]."""
        try:
            with open_array(self.path, IMAGES) as (file, shape, kind, fortran):
                require(
                    kind == np.uint8 and not fortran and len(shape) > 1,
                    f"{self.path}: {kind} {list(shape)}{' in Fortran order' if fortran else ''} is not a set of "
                    "images: give uint8 from 0 to 255, [n, H, W], [n, H, W, C] or [n, C, H, W] in C order",
                )
                yield file, shape, self.layout(shape[1:])
        except ConfigError:
            raise
        except Exception as error:  # a damaged file may throw anything
            raise ConfigError(f"{self.path} is damaged or not an array of images ({error!r})") from error

    def layout(self, shape: tuple[int, ...]):
        if len(shape) == 1 and self.planes is not None and shape[0] == np.prod(self.planes):
            planes = self.planes
            return lambda image: image.reshape(planes).transpose(1, 2, 0)
        if len(shape) == 2:
            return lambda image: image
        if len(shape) == 3 and shape[2] in (1, 3, 4):
            return lambda image: image[..., 0] if shape[2] == 1 else image
        if len(shape) == 3 and shape[0] in (1, 3, 4):
            return lambda image: image[0] if shape[0] == 1 else image.transpose(1, 2, 0)
        raise ConfigError(
            f"{self.path}: images of {list(shape)} are not known: use [H, W], [H, W, C] or [C, H, W]"
            + (f", or {np.prod(self.planes):,} numbers" if self.planes else "")
        )

    def labels(self) -> np.ndarray | None:
        """One whole number or name for each image."""
        if self.path.suffix.lower() != ".npz":
            return None
        try:
            with zipfile.ZipFile(self.path) as archive:
                name = next((name for name in LABELS if f"{name}.npy" in archive.namelist()), None)
                large = name is not None and archive.getinfo(f"{name}.npy").file_size > MAX_LABELS
            require(not large, f"{self.path}: its labels are larger than {MAX_LABELS >> 20} MiB")
            if name is None:
                return None
            with np.load(self.path, allow_pickle=False) as file:
                labels = file[name]
        except ConfigError:
            raise
        except Exception as error:  # a damaged file may throw anything
            raise ConfigError(f"{self.path} is damaged or not an array of images ({error!r})") from error
        require(labels.ndim == 1 and labels.dtype.kind in "iuU", f"{self.path}: labels must be [n], numbers or names")
        return labels


@contextmanager
def open_array(path: Path, names: tuple[str, ...]) -> Iterator[tuple[IO[bytes], tuple[int, ...], np.dtype, bool]]:
    """The bytes of an array as a stream, after its header: (stream, shape, dtype, whether in Fortran order)."""
    if path.suffix.lower() == ".npz":
        with zipfile.ZipFile(path) as archive:
            inside = [name.removesuffix(".npy") for name in archive.namelist()]
            name = next((name for name in names if name in inside), inside[0] if len(inside) == 1 else None)
            require(
                name is not None,
                f"{path}: no array of images among {', '.join(inside[:9]) or 'nothing'}: name it {names[0]}",
            )
            member = archive.getinfo(f"{name}.npy")
            ratio = member.file_size // max(1, member.compress_size)
            require(ratio <= MAX_RATIO, f"{path}: {name} unpacks to {ratio} times its size")
            with archive.open(member) as file:
                yield file, *read_header(file, member.file_size)
    else:
        with path.open("rb") as file:
            yield file, *read_header(file, path.stat().st_size)


def read_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], np.dtype, bool]:
    """Shape, dtype and order; a shape that the file cannot hold is an error, not an attempt."""
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, fortran, kind = read[version](file)
    if math.prod(shape) * kind.itemsize > size or (shape and not math.prod(shape)):
        raise EOFError(f"{list(shape)} numbers are not in {size:,} bytes")
    return shape, kind, fortran


def read_blocks(file: IO[bytes], shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """uint8 [some, …] until all are read."""
    one = math.prod(shape[1:])
    block = max(1, BLOCK // one)
    for start in range(0, shape[0], block):
        count = min(block, shape[0] - start)
        data = file.read(count * one)
        if len(data) != count * one:
            raise EOFError(f"it ends after {start + len(data) // max(1, one):,} of {shape[0]:,} images")
        yield np.frombuffer(data, dtype=np.uint8).reshape(count, *shape[1:])
