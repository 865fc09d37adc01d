"""Preparing a folder of JPEGs beside Pillow alone, batches from the cache beside a DataLoader over the folder, and how
long a training step waits for its data.

    PYTHONPATH=src python benchmarks/data.py [count]
    PYTHONPATH=src python benchmarks/data.py waiting

Makes a folder of random JPEGs of 256×256 in a temporary place first; the cache goes there too. The last part trains the
net of cifar10-ict at the size of the images and needs a GPU; `waiting` measures that part alone, on random pixels.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from ict.config import DataConfig
from ict.data import Images, batch_indices
from ict.data.feed import open_feed
from ict.data.images import PixelFile
from ict.data.pile import Pile
from ict.data.prepare import open_prepared, prepare
from ict.data.sources import open_source
from ict.device import place
from ict.model import ModelSpec, build_model
from ict.recipes import find_recipe, load_recipe
from ict.training.budget import Budget
from ict.training.loop import new_state, train

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
    """Detail as photographs have it: amplitudes fall as 1/frequency."""
    rng = np.random.default_rng(0)
    side = 1024
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.fftfreq(side)[None])
    frequency[0, 0] = 1
    grey, *colours = (np.fft.ifft2(np.fft.fft2(rng.normal(size=(side, side))) / frequency).real for _ in range(4))
    planes = [0.8 * grey + 0.2 * colour for colour in colours]
    pixels = np.stack([128 + 50 * (plane - plane.mean()) / plane.std() for plane in planes], axis=-1)
    picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    paths = []
    for i in range(count):
        path = root / f"{i:06d}.jpg"
        left, top = rng.integers(0, side - 256, 2)
        picture.crop((left, top, left + 256, top + 256)).save(path, quality=90)
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

        alone, ours, folder = measure_preparing(config, paths, cores)
        again = measure(lambda: prepare_source(config))
        for count in ours:
            share = ours[count] / alone[count]
            print(f"decoding with Pillow alone, {count:2d} cores {alone[count]:12,.0f} images/s")
            print(f"preparing, {count:2d} cores {ours[count]:29,.0f} images/s = {share:.0%} of that")
        print(f"the second start                       {again:10.3f} s")

        images = open_prepared(folder)
        feed = open_feed(images, lambda step: order(step, len(images)), torch.device("cpu"), kind="stream")
        mapped = 200 * BATCH / measure(lambda: sum(len(feed.take(step)[0]) for step in range(200)))
        loader = DataLoader(Folder(paths), batch_size=BATCH, shuffle=True, num_workers=cores)
        loaded = len(paths) / measure(lambda: sum(len(batch) for batch in loader))
        print(f"batches of {BATCH} from the cache           {mapped:10,.0f} images/s")
        print(f"the same from a DataLoader             {loaded:10,.0f} images/s: {mapped / loaded:.0f} times slower")
        if torch.cuda.is_available():
            show_waiting(images)


def show_waiting(images: Images) -> None:
    for kind in ("resident", "stream"):
        step, wait = measure_waiting(images, kind)
        print(f"a training step, {kind:<8} {1000 * step:22.2f} ms, waiting for data: {wait / step:.2%}", flush=True)


def wait_alone() -> None:
    """The part about waiting, with random pixels in a file."""
    with tempfile.TemporaryDirectory() as home:
        shape = (10_000, 3, SIZE, SIZE)
        (Path(home) / "pixels").write_bytes(np.random.default_rng(0).integers(0, 256, shape, np.uint8).tobytes())
        file = PixelFile(Path(home) / "pixels", shape)
        show_waiting(Images(pixels=file.pixels(), labels=torch.zeros(shape[0]).long(), class_names=("",), file=file))


def measure(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def order(step: int, count: int) -> torch.Tensor:
    return batch_indices(step, batch=BATCH, count=count, seed=0)


def prepare_source(config: DataConfig) -> Path:
    pile = open_source(config)
    assert isinstance(pile, Pile)
    return prepare(pile, config)


def measure_preparing(
    config: DataConfig, paths: list[Path], cores: int
) -> tuple[dict[int, float], dict[int, float], Path]:
    """Images/s of Pillow alone and of preparing on 1, 2, … cores, by turns; the best of three each."""
    home = os.environ["ICT_CACHE"]
    alone, ours, folder = {}, {}, Path()
    everyone = os.sched_getaffinity(0)
    for turn in range(3):
        for count in sorted({1, *(count for count in (2, 4, 8) if count < cores), cores}):
            os.environ["ICT_CACHE"] = f"{home}/{turn}-{count}"
            os.sched_setaffinity(0, sorted(everyone)[:count])
            alone[count] = max(alone.get(count, 0.0), decode_by_processes(paths, count))
            begun = time.perf_counter()
            folder = prepare_source(config)
            ours[count] = max(ours.get(count, 0.0), len(paths) / (time.perf_counter() - begun))
            os.sched_setaffinity(0, everyone)
    return alone, ours, folder


def decode_by_processes(paths: list[Path], count: int) -> float:
    """Images/s of processes that only decode, each its share; their start is not counted."""
    program = [sys.executable, __file__, "alone", str(paths[0].parent)]
    shares = [subprocess.Popen([*program, str(i), str(count)], stdout=subprocess.PIPE, text=True) for i in range(count)]
    seconds = [float(one.communicate()[0]) for one in shares]
    return len(paths) / max(seconds)


def decode_share(folder: str, place: str, count: str) -> None:
    paths = sorted(Path(folder).iterdir())[int(place) :: int(count)]
    print(measure(lambda: [decode_alone(path) for path in paths]))


def measure_waiting(images: Images, kind: str) -> tuple[float, float]:
    """Seconds of a training step at batch 512, and of that what the loop waited for its batch."""
    config = load_recipe(
        find_recipe("cifar10-ict"),
        [
            "data.image_size=64",
            "data.classes=0",
            f"training.batch={BATCH}",
            "training.accumulate=4",
            f'data.feed="{kind}"',
        ],
    )
    spec = ModelSpec.from_config(config, ())
    model = build_model(spec, seed=0)
    place(model, "cuda")
    state = new_state(config, model)
    steps = train(config, state, images, Budget(steps=13))
    for _ in range(3):
        next(steps)
    torch.cuda.synchronize()
    begun, waited = time.perf_counter(), state.waited
    for _ in steps:
        pass
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / 10, (state.waited - waited) / 10


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["alone", *share]:
            decode_share(*share)
        case ["waiting"]:
            wait_alone()
        case _:
            main()
