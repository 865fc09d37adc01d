"""Where a model's score comes from: real images with noise of each level, answered in one step.

    PYTHONPATH=src python benchmarks/levels.py MODEL SOURCE [features] [weights] [samples]

MODEL is a run or a model file, SOURCE a path or a name of a set, features `inception` (and its weights) or `digits`. At
a low level an answer is almost the image itself, at the highest one a sample: where the distance grows in between, the
model loses. The first row is the images themselves.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import ict
from ict import rng
from ict.config import DataConfig
from ict.data import Images, load_images
from ict.device import pick_device
from ict.evaluation.features import open_features
from ict.evaluation.judge import look, look_at_real
from ict.evaluation.metrics import frechet_distance, kernel_distance
from ict.objectives.base import add_noise
from ict.pixels import to_float, to_uint8
from ict.rng import Stream
from ict.sampling import Generator

LEVELS = (0.02, 0.1, 0.3, 0.8, 2.0, 5.0, 12.0, 30.0, 80.0)
BATCH = 500


def answers(generator: Generator, images: Images, chosen: Tensor, sigma: float) -> Iterator[Tensor]:
    """f(x + σ z, σ) of the chosen images."""
    device = generator.device
    for numbers in chosen.split(BATCH):
        x, samples = to_float(images.pixels[numbers].to(device)), numbers.to(device)
        z = rng.normal(samples, tuple(x.shape[1:]), seed=0, step=0, stream=Stream.NOISE)
        level = torch.full((len(x),), sigma, dtype=torch.float64, device=device)
        label = images.labels[numbers].to(device) if generator.spec.class_names else None
        yield to_uint8(generator.model(add_noise(x, level, z), level, label))


@torch.inference_mode()
def main() -> None:
    path, source, *rest = sys.argv[1:]
    features, weights, samples = [*rest, *["inception", "", "10000"][len(rest) :]]
    device = pick_device("auto")
    generator = ict.load(path, device=device)
    spec = generator.spec
    images = load_images(DataConfig(source=source, image_size=spec.image_size, channels=spec.channels))
    net = open_features(features, weights=Path(weights) if weights else None, device=device)
    real, count = look_at_real(images, net), min(int(samples), len(images))
    print(f"{path}: {count:,} answers a level\n\n     σ   {net.frechet:>9}  {net.kernel:>9}")
    chosen = torch.linspace(0, len(images) - 1, count).long()  # from all over the set
    for sigma in (0.0, *LEVELS):
        some = images.pixels[chosen].split(BATCH) if sigma == 0 else answers(generator, images, chosen, sigma)
        seen = look(some, net)
        kid = kernel_distance(real.features, seen.features)[0]
        print(f"{sigma:6g}   {frechet_distance(seen.moments, real.moments):9.3f}  {kid:9.5f}", flush=True)


if __name__ == "__main__":
    main()
