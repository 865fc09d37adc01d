"""Short runs of single changes to a recipe, one after the other, each judged at its end: a log for a speed-run.

    PYTHONPATH=src python benchmarks/speedrun.py RECIPE INCEPTION CIFAR10 SECONDS ["name: key=value key=value" ...]

Each run trains for SECONDS (or seconds=… among its keys) from random weights, Triton's compiling not counted, and is
judged by FID of 10,000 samples in one and in two steps, for every average that it keeps. With GRIDS=folder in the
environment a grid of samples of each run (one step, seed 0) is kept there, with SAVE=folder its model file.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from ict.config import DataConfig
from ict.data import load_images
from ict.evaluation.features import open_features
from ict.evaluation.judge import draw, look, look_at_real
from ict.evaluation.metrics import frechet_distance
from ict.experiment.main import rehearse
from ict.model import ModelSpec, build_model, pack_model
from ict.pictures import grid, png
from ict.ranks import ALONE
from ict.recipes import find_recipe, load_recipe
from ict.sampling import Generator
from ict.training.budget import Budget
from ict.training.ema import WeightAverage
from ict.training.guard import Guard
from ict.training.loop import new_state, train
from ict.training.speed import set_up

SAMPLES = int(os.environ.get("SAMPLES", "10000"))


def main() -> None:
    recipe, inception, cifar10, usual, *changes = sys.argv[1:]
    device = torch.device("cuda")
    images = load_images(DataConfig(source="cifar10", path=cifar10, image_size=32, channels=3))
    net = open_features("inception", weights=Path(inception), device=device)
    with torch.inference_mode():
        real = look_at_real(images, net)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {recipe}, {usual} s each, FID of {SAMPLES:,}")
    for change in changes or ["as it is:"]:
        name, _, keys = change.partition(":")
        given = keys.split()
        seconds = next((key.partition("=")[2] for key in given if key.startswith("seconds=")), usual)
        config = load_recipe(find_recipe(recipe), [key for key in given if not key.startswith("seconds=")])
        config = replace(config, training=replace(config.training, steps=None, images=None, budget=f"{seconds}s"))
        spec = ModelSpec.from_config(config, images.class_names)
        model = build_model(spec, seed=config.seed)
        set_up(config, model, device)
        torch.cuda.reset_peak_memory_stats()
        state, levels = new_state(config, model), 0
        rehearse(config, state, images, ALONE)  # as a run does: Triton compiles its kernels here
        begun = time.perf_counter()
        guard = Guard(config, ALONE, device)
        for _ in train(config, state, images, Budget(seconds=float(seconds)), guard=guard, warn=print):
            levels = state.stats.get("levels", state.stats.get("stage", 0))
            if guard.alarm is not None:
                print(f"step {state.step}: {guard.alarm}", *list(guard.history)[-12:], sep="\n  ")
                break
        spent = time.perf_counter() - begun
        print(
            f"{name} | {keys.strip()} | {state.model.size / 1e6:.1f}M | {state.step:,} steps, "
            f"{state.step * config.training.batch / spent:,.0f} images/s, "
            f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB | N {levels} | loss {guard.state.smooth:.3g}, scale "
            f"{guard.state.scale:g} after {guard.state.overflows} overflows, {guard.state.skipped} skipped | "
            f"{judge(state, spec, net, real, device)}",
            flush=True,
        )
        keep(name.strip().replace(" ", "-"), state.averages[0], spec, device)
        del state, model
        torch.cuda.empty_cache()


@torch.inference_mode()
def judge(state, spec: ModelSpec, net, real, device: torch.device) -> str:
    found = []
    for average in state.averages:
        generator = generator_of(average, spec, device)
        scores = []
        for steps in (1, 2):
            seen = look(draw(generator, None, generator.ladder(steps), SAMPLES, 0, 500), net)
            scores.append(f"{frechet_distance(seen.moments, real.moments):.2f}")
        found.append(f"ema {average.decay:g}: {' / '.join(scores)}")
    return "; ".join(found)


def keep(name: str, average: WeightAverage, spec: ModelSpec, device: torch.device) -> None:
    """What the environment asks for."""
    kept = {}
    if "GRIDS" in os.environ:
        images = generator_of(average, spec, device).sample(64)
        kept[Path(os.environ["GRIDS"]) / f"{name}.png"] = png(grid(images, scale=2))
    if "SAVE" in os.environ:
        packed = pack_model(spec, average.weights, {"run": name})
        kept[Path(os.environ["SAVE"]) / f"{name}.safetensors"] = packed
    for path, data in kept.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def generator_of(average: WeightAverage, spec: ModelSpec, device: torch.device) -> Generator:
    model = build_model(spec)
    model.load_state_dict(average.weights)
    return Generator(model, spec).to(device)


if __name__ == "__main__":
    main()
