"""Single changes to a recipe tried on a CPU: CIFAR-10 at 16×16 pixels, a small net, judged by a small reader of it.

    PYTHONPATH=src python benchmarks/small_cifar.py CIFAR10 READER.pt STEPS ["name: key=value key=value" ...] \\
        [--inception FILE]

The reader, a classifier of five convolutions, is trained in minutes and kept in READER.pt. Each run has a U-Net of
1M parameters, Muon, the exact score of the set, N from 11 to 161; 800 steps of 64 take about ten minutes of one core.
Printed for every average that it keeps: Fréchet distance by the reader's features of 4,000 samples in one step and in
two, and of the model's answers to 2,000 real images with noise of some levels. The reader is small and was trained on
the same images, and has been wrong: with --inception also KID by Inception of 1,200 samples against 3,000 images (some
minutes more each).
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ict.config import DataConfig
from ict.data import Images, load_images
from ict.evaluation.features import inception
from ict.evaluation.judge import look
from ict.evaluation.metrics import Moments, MomentSum, frechet_distance, kernel_distance
from ict.model import ModelSpec, build_model
from ict.pixels import to_float, to_uint8
from ict.recipes import find_recipe, load_recipe
from ict.sampling import Generator
from ict.training.budget import Budget
from ict.training.loop import new_state, train

BASE = """data.image_size=16 data.channels=3 data.classes=0 net.channels=32 net.multipliers=[1,2,2] net.blocks=1
net.attention=[8] net.head_channels=32 net.dropout=0.0 training.batch=64 training.optimiser=muon training.lr=2e-3
training.betas=[0.9,0.99] training.ema=[0.99] training.lr_schedule=trapezoid objective.score=data"""
LEVELS = (0.3, 0.8, 2.0, 5.0, 20.0)


class Reader(nn.Module):
    """A classifier, whose last map's mean is what images are compared by."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        convolutions = [nn.Conv2d(i, o, 3, stride=s, padding=1, bias=False) for i, o, s in sizes]
        layers = [(one, nn.BatchNorm2d(one.out_channels), nn.ReLU()) for one in convolutions]
        self.maps, self.out = nn.Sequential(*(layer for each in layers for layer in each)), nn.Linear(128, 10)

    def features(self, pixels: Tensor) -> Tensor:
        return self.maps(to_float(pixels)).mean(dim=(2, 3))

    @torch.inference_mode()
    def moments(self, pixels: Tensor) -> Moments:
        found = MomentSum()
        for block in pixels.split(1000):
            found.add(self.features(block))
        return found.moments()


class Judge:
    """KID of samples by Inception, in words."""

    def __init__(self, weights: Path, real: Tensor):
        self.net = inception(weights, torch.device("cpu"))
        self.real = look(real.split(100), self.net).features

    def __call__(self, pixels: Tensor) -> str:
        mean, deviation = kernel_distance(self.real, look(pixels.split(100), self.net).features)
        return f"{1000 * mean:.1f} ± {1000 * deviation:.1f}"


def open_reader(path: Path, images: Images) -> Reader:
    reader = Reader()
    if path.is_file():
        reader.load_state_dict(torch.load(path, weights_only=True))
        return reader.eval()
    torch.manual_seed(0)
    epochs, size = 8, 128
    optimiser = torch.optim.AdamW(reader.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=epochs * (len(images) // size))
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(size)[: len(images) // size]:
            loss = F.cross_entropy(reader.out(reader.features(images.pixels[chosen])), images.labels[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    torch.save(reader.state_dict(), path)
    return reader.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Single changes to a recipe, on a small CIFAR-10.")
    parser.add_argument("cifar10")
    parser.add_argument("reader", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("changes", nargs="*", default=["as it is:"])
    parser.add_argument("--inception", type=Path)
    given = parser.parse_intermixed_args()
    large = load_images(DataConfig(source="cifar10", path=given.cifar10, image_size=32, channels=3))
    pixels = F.avg_pool2d(large.pixels.float(), 2).round().to(torch.uint8)
    images = Images(pixels=pixels, labels=large.labels, class_names=large.class_names)
    judge = Judge(given.inception, pixels[10_000:13_000]) if given.inception else None
    reader = open_reader(given.reader, images)
    torch.set_num_threads(1)
    real = reader.moments(pixels)
    print(f"4,000 real images: {frechet_distance(reader.moments(pixels[:4000]), real):.3f}", flush=True)
    noise = torch.randn(2000, *images.shape, generator=torch.Generator().manual_seed(1))
    for change in given.changes:
        name, _, keys = change.partition(":")
        config = load_recipe(find_recipe("digits"), [*BASE.split(), f"training.steps={given.steps}", *keys.split()])
        spec = ModelSpec.from_config(config, images.class_names)
        state, begun = new_state(config, build_model(spec, seed=config.seed)), time.perf_counter()
        for _ in train(config, state, images, Budget(steps=given.steps)):
            pass
        for average in state.averages:
            model = build_model(spec)
            model.load_state_dict(average.weights)
            generator = Generator(model, spec)
            drawn = [to_uint8(generator.sample(4000, steps=calls, batch=500)) for calls in (1, 2)]
            answers = [to_uint8(answer(generator, pixels[:2000], noise, sigma)) for sigma in LEVELS]
            scores = [frechet_distance(reader.moments(one), real) for one in (*drawn, *answers)]
            by_level = ", ".join(f"σ {sigma:g} {score:.2f}" for sigma, score in zip(LEVELS, scores[2:], strict=True))
            spent, who = time.perf_counter() - begun, f"{name}, ema {average.decay:g}"
            print(f"{who}: {scores[0]:.2f} / {scores[1]:.2f}; {by_level}; {spent:.0f} s", flush=True)
            if judge is not None:
                print(f"{who}: KID times 1,000: " + " / ".join(judge(each[:1200]) for each in drawn), flush=True)


@torch.inference_mode()
def answer(generator: Generator, pixels: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """The model's clean images for real ones with noise of a level."""
    noisy = (to_float(pixels) + sigma * noise).split(500)
    return torch.cat([generator.model(one, torch.full((len(one),), sigma)) for one in noisy]).clamp(-1, 1)


if __name__ == "__main__":
    main()
