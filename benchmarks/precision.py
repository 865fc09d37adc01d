"""How far each precision of the trunk turns the gradient of the iCT loss, at each N and noise level.

    PYTHONPATH=src python benchmarks/precision.py MODEL CIFAR10 [batch] [levels …]

MODEL is a trained model: at the start the net answers almost nothing, and every precision looks good. For each N and
each of eight stretches of log σ, a batch of images at pairs of levels from there goes through student and teacher with
the same noise and dropout. Against the same in float32 (no tf32), printed for each precision:

    cos     cosine between the two gradients with respect to the weights, and the ratio of their norms
    noise   RMS over the batch of the error of the difference of outputs, relative to that difference; and over c
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from ict.config import DataConfig
from ict.data import load_images
from ict.device import make_deterministic, pick_device, place
from ict.distance import huber_c, pseudo_huber
from ict.model import ConsistencyModel, read_model
from ict.noise import karras_sigmas
from ict.objectives import Step
from ict.objectives.base import add_noise
from ict.pixels import to_float
from ict.precision import allow_tf32

BINS = 8
PRECISIONS = ("tf32", "fp16", "bf16")


def gradient(model: ConsistencyModel, x: Tensor, low: Tensor, high: Tensor, step: Step, precision: str):
    """The gradient of the mean loss as one vector, and the difference of the outputs."""
    model.precision = precision
    allow_tf32(precision)
    model.zero_grad(set_to_none=True)
    z, key = step.noise(x), step.keys()
    student = model(add_noise(x, high, z), high, None, key)
    with torch.no_grad():
        teacher = model(add_noise(x, low, z), low, None, key)
    loss = (pseudo_huber(student, teacher) / (high - low)).float().mean()
    scale = 256.0 if precision == "fp16" else 1.0
    while True:
        (scale * loss).backward(retain_graph=True)
        found = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]) / scale
        if found.isfinite().all() or scale <= 1:
            return found, (student - teacher).detach()
        scale /= 4
        model.zero_grad(set_to_none=True)


def main() -> None:
    path, cifar10, *rest = sys.argv[1:]
    batch, grids = int(rest[0]) if rest else 64, [int(n) for n in rest[1:]] or [11, 41, 161, 641, 1281]
    device = pick_device("auto")
    images = load_images(DataConfig(source="cifar10", path=cifar10, image_size=32, channels=3))
    model, spec, _ = read_model(Path(path))
    place(model, device)
    model.train()
    make_deterministic(True)
    x = to_float(images.pixels[:batch].to(device))
    step = Step(seed=0, number=0, done=0, total=1, samples=torch.arange(batch, device=device))
    c, edges = huber_c(x[0].numel()), torch.logspace(-2.69897, 1.90309, BINS + 1, dtype=torch.float64)
    print(f"{model.size / 1e6:.1f}M, batch {batch}, c = {c:.4f}")
    print(f"{'N':>5} {'σ':>15} {'‖Δ‖':>8} | " + " | ".join(f"{p:>4}: cos  norm  noise noise/c" for p in PRECISIONS))
    for n in grids:
        grid = karras_sigmas(n, sigma_max=spec.noise.sigma_max, sigma_min=spec.noise.sigma_min)
        worst = dict.fromkeys(PRECISIONS, 1.0)
        for place_ in range(BINS):
            inside = ((grid[1:] > edges[place_]) & (grid[1:] <= edges[place_ + 1] * 1.0001)).nonzero()[:, 0]
            if not len(inside):
                continue
            pairs = inside[torch.arange(batch) % len(inside)]
            low, high = grid[pairs].to(device), grid[pairs + 1].to(device)
            truth, difference = gradient(model, x, low, high, step, "float32")
            cells = []
            for precision in PRECISIONS:
                found, other = gradient(model, x, low, high, step, precision)
                cosine = (torch.dot(found, truth) / (found.norm() * truth.norm())).item()
                error = (other - difference).flatten(1).norm(dim=1).square().mean().sqrt().item()
                size = difference.flatten(1).norm(dim=1).square().mean().sqrt().item()
                worst[precision] = min(worst[precision], cosine)
                cells.append(f"{cosine:9.5f} {found.norm() / truth.norm():6.3f} {error / size:6.3f} {error / c:6.3f}")
            print(
                f"{n:5d} {edges[place_]:7.3g}–{edges[place_ + 1]:<7.3g} {size:8.4f} | " + " | ".join(cells), flush=True
            )
        print(f"{n:5d} worst cosine: " + ", ".join(f"{p} {value:.5f}" for p, value in worst.items()), flush=True)


if __name__ == "__main__":
    main()
