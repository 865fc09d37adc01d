"""How long an evaluation takes, part by part: sampling, features, scores.

    PYTHONPATH=src python benchmarks/eval.py INCEPTION CIFAR10 [samples] [recipe]

INCEPTION is a file of weights, CIFAR10 a folder of the set. The model has random weights: its speed is what matters.
Also prints the FID of the first 10,000 training images against all 50,000, a check of the whole chain (2.124).
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from ict.bench import synchronise
from ict.config import DataConfig
from ict.data import load_images
from ict.device import pick_device
from ict.evaluation.features import open_features
from ict.evaluation.judge import Judge, draw, look, score
from ict.evaluation.metrics import compare_neighbours, frechet_distance, kernel_distance
from ict.model import ModelSpec, build_model
from ict.recipes import find_recipe, load_recipe
from ict.sampling import Generator


class Clock:
    """Prints how long each part took."""

    def __init__(self, device: torch.device):
        self.device, self.total = device, 0.0

    def __call__(self, text: str, work):
        synchronise(self.device)
        begun = time.perf_counter()
        result = work()
        synchronise(self.device)
        spent = time.perf_counter() - begun
        self.total += spent
        print(f"{text:<52}{spent:9.2f} s", flush=True)
        return result


def main() -> None:
    inception, cifar10 = Path(sys.argv[1]), sys.argv[2]
    samples = int(sys.argv[3]) if len(sys.argv) > 3 else 50_000
    recipe = load_recipe(find_recipe(sys.argv[4] if len(sys.argv) > 4 else "cifar10-ict"))
    device = pick_device("auto")
    images = load_images(DataConfig(source="cifar10", path=cifar10, image_size=32, channels=3))
    spec = ModelSpec.from_config(recipe, images.class_names)
    generator = Generator(build_model(spec), spec).to(device)
    with tempfile.TemporaryDirectory() as home, torch.inference_mode():
        os.environ["ICT_CACHE"] = home
        net = open_features("inception", weights=inception, device=device)
        clock = Clock(device)
        net(images.pixels[:250])
        judge = clock(f"features of {len(images):,} real images", lambda: Judge.of(images, net, samples=samples))
        first = look(images.pixels[:10_000].split(250), net)
        print(f"FID of the first 10,000 against all: {frechet_distance(first.moments, judge.real.moments):.4f}")
        list(draw(generator, None, [80.0], 500, 0, 250))
        clock.total = 0.0
        batches = clock(
            f"{samples:,} samples, {recipe.name}", lambda: list(draw(generator, None, [80.0], samples, 0, 250))
        )
        seen = clock("their features", lambda: look(batches, net))
        clock("FID", lambda: frechet_distance(seen.moments, judge.real.moments))
        print(f"{f'FID-{samples // 1000}k, sampling included':<52}{clock.total:9.2f} s")
        clock("KID", lambda: kernel_distance(judge.real.features, seen.features))
        clock("precision, recall, neighbours", lambda: compare_neighbours(judge.real.features, seen.features))
        clock("all of them together", lambda: score(seen, judge.real, net))
        if device.type == "cuda":
            print(f"memory, at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
