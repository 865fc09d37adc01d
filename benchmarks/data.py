"""Preparing a folder of JPEGs beside Pillow alone, and batches from the cache beside a DataLoader over the folder.

    PYTHONPATH=src python benchmarks/data.py [count]

Makes a folder of random JPEGs of 256×256 in a temporary place first; the cache goes there too.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from ict.config import DataConfig
from ict.data import batch_indices
from ict.data.prepare import open_prepared, prepare

SIZE, BATCH = 64, 512


def decode_alone(path: Path) -> np.ndarray:
    """What anybody would write with Pillow: open, convert, resize."""
    with Image.open(path) as image:
        image.draft("RGB", (2 * SIZE, 2 * SIZE))
        return np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.LANCZOS))


class Folder(Dataset):
    """A plain data set over the files."""

    def __init__(self, paths: list[Path]):
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.from_numpy(decode_alone(self.paths[i]).transpose(2, 0, 1).copy())


def make_folder(root: Path, count: int) -> list[Path]:
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).resize(
        (300, 300), Image.Resampling.BICUBIC
    )
    paths = []
    for i in range(count):
        path = root / f"{i:06d}.jpg"
        left, top = rng.integers(0, 44, 2)
        smooth.crop((left, top, left + 256, top + 256)).save(path, quality=90)
        paths.append(path)
    return paths


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as home:
        os.environ["ICT_CACHE"] = f"{home}/cache"
        (Path(home) / "pile").mkdir()
        paths = make_folder(Path(home) / "pile", count)
        config = DataConfig(source=f"{home}/pile", image_size=SIZE, channels=3)

        begun = time.perf_counter()
        for path in paths[: count // 4]:
            decode_alone(path)
        alone = count // 4 / (time.perf_counter() - begun)
        begun = time.perf_counter()
        folder = prepare(config)
        ours = count / (time.perf_counter() - begun)
        begun = time.perf_counter()
        prepare(config)
        again = time.perf_counter() - begun
        print(f"decoding with Pillow alone, one core   {alone:10,.0f} images/s")
        print(f"preparing, {cores} cores                    {ours:10,.0f} images/s = {ours / cores / alone:.0%} a core")
        print(f"the second start                       {again:10.3f} s")

        images = open_prepared(folder)
        begun = time.perf_counter()
        for step in range(100):
            images.pixels[batch_indices(step, batch=BATCH, count=count, seed=0)]
        mapped = 100 * BATCH / (time.perf_counter() - begun)
        begun = time.perf_counter()
        loader = DataLoader(Folder(paths), batch_size=BATCH, shuffle=True, num_workers=cores)
        loaded = sum(len(batch) for batch in loader) / (time.perf_counter() - begun)
        print(f"batches of {BATCH} from the cache           {mapped:10,.0f} images/s")
        print(f"the same from a DataLoader             {loaded:10,.0f} images/s: {mapped / loaded:.0f} times slower")


if __name__ == "__main__":
    main()
