"""What several tests build on: a recipe that trains in a second, and nets whose answer is known."""

import io
import math
import tarfile
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from ict.config import Config, NoiseConfig
from ict.data import load_images
from ict.experiment import run
from ict.files import step_name
from ict.model import ConsistencyModel, ModelSpec, build_model, pack_model, scalings
from ict.objectives import Step
from ict.pixels import to_uint8
from ict.reading import from_dict
from ict.recipes import find_recipe, load_recipe
from ict.sampling import load
from ict.training.guard import Guard

TINY = {
    "name": "tiny",
    "data": {"source": "digits", "image_size": 8, "channels": 1, "classes": 10, "flip": True},
    "net": {"channels": 8, "multipliers": [1, 2], "blocks": 1, "attention": [4], "dropout": 0.2},
    "objective": {"s0": 2, "s1": 8},
    "training": {
        "steps": 12, "batch": 8, "lr": 1e-3, "ema": [0.9, 0.99], "log_every": 3, "save_every": 4, "snapshots": 2,
        "keep": 10,
    },
}  # fmt: skip


def tiny_config(**sections: dict) -> Config:
    """The tiny recipe with some keys changed: tiny_config(training={"steps": 3})."""
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in TINY.items()}
    for section, changes in sections.items():
        values[section] = values.get(section, {}) | changes
    return from_dict(Config, values)


def write_tar(path: Path, files: list[tuple[str, bytes]], mode: str = "w") -> Path:
    """A tar of named contents; compressed by its mode."""
    with tarfile.open(path, mode) as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def diffusion_file(folder: Path) -> Path:
    """An untrained diffusion model of grey images of 8×8 pixels, without classes."""
    spec = ModelSpec(image_size=8, channels=1, kind="diffusion", net=tiny_config().net)
    path = folder / "diffusion.safetensors"
    path.write_bytes(pack_model(spec, build_model(spec).state_dict(), {}))
    return path


def trained_weights(config: Config, folder: Path, **options) -> dict[str, Tensor]:
    """The model that a silent run on the CPU ends with."""
    run(config, folder, device="cpu", console=Console(file=io.StringIO()), **options)
    return load(folder).model.state_dict()


def check_resume(config: Config, folder: Path) -> dict[str, Tensor]:
    """A run of twelve steps that lost its last two checkpoints ends as the whole one, to the bit -> its weights."""
    whole = trained_weights(config, folder / "whole")
    trained_weights(config, folder / "cut")
    for step in (8, 12):
        (folder / "cut" / "checkpoints" / step_name(step) / "checkpoint.json").write_text("lost")
    assert same_weights(trained_weights(config, folder / "cut", resume=True), whole)
    return whole


def same_weights(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def check_step(guard: Guard, loss: float, gradient: float, **step) -> bool:
    """Whether the guard lets a step pass; what it says at once, before the numbers are known, must be the same."""
    good = guard.ask(torch.tensor(loss), torch.tensor(gradient))
    taken = guard.check(**step)
    assert taken == good.item()
    return taken


def step_of(batch: int, *, number: int = 0, done: int = 0, total: int = 100, seed: int = 0) -> Step:
    return Step(seed=seed, number=number, done=done, total=total, samples=torch.arange(batch))


class SpyNet(nn.Module):
    """Returns zeros (times one parameter) and remembers what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls: list[dict] = []

    def forward(self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        self.calls.append(
            {"x": x, "c_noise": c_noise, "label": label, "key": key,
             "training": self.training, "grad": torch.is_grad_enabled()}
        )  # fmt: skip
        return self.weight * 0 * x


class GaussianNet(nn.Module):
    """F such that f is the exact consistency function of data ~ N(0, s²): f(x, σ) = x √((s² + σ_min²)/(s² + σ²))."""

    def __init__(self, s: float, noise: NoiseConfig) -> None:
        super().__init__()
        self.log_s = nn.Parameter(torch.tensor(math.log(s), dtype=torch.float64))
        self.noise = noise

    def forward(self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        sigma = torch.exp(4 * c_noise.double())
        c = scalings(sigma, sigma_min=self.noise.sigma_min, sigma_data=self.noise.sigma_data)
        variance = torch.exp(2 * self.log_s)
        shrink = torch.sqrt((variance + self.noise.sigma_min**2) / (variance + sigma**2))
        slope = (shrink - c.c_skip) / c.c_out.clamp(min=1e-12)
        return (slope / c.c_in).reshape(-1, 1, 1, 1) * x


def gaussian_model(s: float, noise: NoiseConfig) -> ConsistencyModel:
    return ConsistencyModel(GaussianNet(s, noise), noise, image_shape=(1, 8, 8))


class DeltaNet(nn.Module):
    """F such that f is the exact consistency function of data that is one image: it always answers with that."""

    def __init__(self, image: Tensor, *, sigma_min: float, sigma_data: float = 0.5) -> None:
        super().__init__()
        self.image, self.sigma_min, self.sigma_data = image, sigma_min, sigma_data
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        sigma = torch.exp(4 * c_noise.double())
        scaled = scalings(sigma, sigma_min=self.sigma_min, sigma_data=self.sigma_data)
        c_skip, c_out, c_in = (c.reshape(-1, 1, 1, 1) for c in scaled[:3])
        return self.weight * (self.image - c_skip * x / c_in) / c_out


def fit_judge():
    """A classifier fitted to the real digits, first shown to know digits that it has not seen."""
    from sklearn.neural_network import MLPClassifier

    images = load_images(load_recipe(find_recipe("digits")).data)
    x, y = images.pixels.flatten(1).numpy() / 255, images.labels.numpy()
    half = MLPClassifier((128,), alpha=1e-2, max_iter=400, random_state=0).fit(x[::2], y[::2])
    assert half.score(x[1::2], y[1::2]) > 0.95
    assert half.predict_proba(x[1::2]).max(axis=1).mean() > 0.9
    return MLPClassifier((128,), alpha=1e-2, max_iter=400, random_state=0).fit(x, y)


def verdict(judge, images: torch.Tensor) -> np.ndarray:
    """What the judge makes of samples: the probability of each digit."""
    return judge.predict_proba(to_uint8(images).flatten(1).numpy() / 255)
