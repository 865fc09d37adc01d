"""Images out of noise: one network call, or several (§2)."""

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ict import rng
from ict.config import PRECISIONS, NoiseConfig
from ict.device import pick_device, place
from ict.files import DamagedFile, list_checkpoints, step_of
from ict.model import ConsistencyModel, ModelSpec, read_model, read_origin
from ict.noise import karras_sigmas
from ict.precision import allow_tf32, pick_precision
from ict.reading import ConfigError, require, suggest
from ict.recording import answer, forget
from ict.rng import Stream
from ict.solvers import heun
from ict.training.checkpoint import MANIFEST, average_name, check_checkpoint


def level_ladder(steps: int, noise: NoiseConfig, *, sigma_mid: float, first: float = 0.0) -> list[float]:
    """The noise levels of `steps` network calls: `first` (σ_max unless given), σ_mid last, even in σ^(1/ρ) between."""
    require(1 <= steps <= 1000, f"steps = {steps}: use 1 to 1000")
    first = first or noise.sigma_max
    high, low = first ** (1 / noise.rho), sigma_mid ** (1 / noise.rho)
    inner = [(high + (low - high) * k / (steps - 1)) ** noise.rho for k in range(1, steps - 1)]
    return [first, *inner, *([sigma_mid] if steps > 1 else [])]


def trajectory(steps: int, noise: NoiseConfig, *, first: float = 0.0) -> list[float]:
    """The noise levels that a diffusion model is sampled along: Karras' grid, falling; a last step leads to 0."""
    require(2 <= steps <= 1000, f"steps = {steps}: a diffusion model takes 2 to 1000 (usual are {DIFFUSION_STEPS})")
    first = first or noise.sigma_max
    sigmas = karras_sigmas(steps, sigma_min=noise.sigma_min, sigma_max=first, rho=noise.rho)
    return [first, *sigmas.flip(0)[1:-1].tolist(), noise.sigma_min]


DIFFUSION_STEPS = 18


def check_ladder(sigmas: Sequence[float], spec: ModelSpec) -> list[float]:
    """The levels as Python's numbers, if a model can be sampled along them."""
    noise = spec.noise
    try:
        ladder = [] if isinstance(sigmas, str) else [float(one) for one in sigmas]
    except (TypeError, ValueError):
        ladder = []
    lowest = ladder[-1] if ladder else 0.0
    above = lowest > noise.sigma_min or (spec.kind == "diffusion" and lowest == noise.sigma_min)
    falling = all(a > b for a, b in itertools.pairwise(ladder))
    highest, start = noise.sigma_max, spec.start.sigma
    begins = len(ladder) > 0 and (ladder[0] == highest or 0 < start <= ladder[0] < highest)
    require(
        falling and above and begins,
        f"sigmas = {ladder or sigmas}: give a list of falling noise levels that start at {highest}"
        f"{f', or from {start} on,' if start else ''} and stay above {noise.sigma_min}",
    )
    return ladder


def whole(name: str, value: object) -> int:
    """A whole number of whatever type, as Python's own."""
    try:
        return operator.index(value)  # type: ignore
    except (TypeError, ValueError):
        raise ConfigError(f"{name} = {value!r}: use a whole number") from None


def check_count(n: int) -> None:
    whole("n", n)
    require(1 <= n <= 10_000_000, f"n = {n}: ask for at least 1 image, and at most 10 million at a time")


@torch.no_grad()
def sample_numbers(
    model: ConsistencyModel, numbers: Tensor, *, sigmas: Sequence[float], seed: int, labels: Tensor | None, clip: bool
) -> Tensor:
    """Images number `numbers` (int64 [B]) of a seed, one network call for each of the falling `sigmas` (§2).

    A diffusion model is solved along them instead. Of a consistency model:
    x ← f(σ_max z, σ_max), or of another start; then for each further level x ← f(x + √(σ² − σ_min²) z, σ), with fresh
    z every time. The noise is a function of (seed, number, call), so an image does not depend on the batch it is in.
    """
    if model.kind == "diffusion":
        return solve(model, numbers, sigmas=sigmas, seed=seed, labels=labels, clip=clip)
    x = torch.zeros(len(numbers), *model.image_shape, device=numbers.device)
    for call, sigma in enumerate(sigmas):
        x = sample_call(model, x, numbers, call=call, sigma=sigma, seed=seed, labels=labels, clip=clip)
    return x


def solve(
    model: ConsistencyModel, numbers: Tensor, *, sigmas: Sequence[float], seed: int, labels: Tensor | None, clip: bool
) -> Tensor:
    """Heun's method on dx/dσ = (x − D(x, σ)) / σ from the start down the levels, and Euler's for the last step to 0."""
    x = begin(model, numbers, sigma=sigmas[0], seed=seed, labels=labels)
    x = flow(model, x, sigmas=sigmas, labels=labels)
    return x.clamp(-1, 1) if clip else x


def begin(model: ConsistencyModel, numbers: Tensor, *, sigma: float, seed: int, labels: Tensor | None) -> Tensor:
    """What stands for noisy images number `numbers` of a level: σ_max · z; below that, what the model has for it."""
    if model.start is not None and sigma < model.noise.sigma_max:
        return model.start.draw(numbers, sigma=sigma, seed=seed, labels=labels)
    return sigma * rng.normal(numbers, model.image_shape, seed=seed, step=0, stream=Stream.SAMPLING)


def flow(model: ConsistencyModel, x: Tensor, *, sigmas: Sequence[float], labels: Tensor | None) -> Tensor:
    """The same from given x at the first level."""

    def level(sigma: float) -> Tensor:
        return torch.full((len(x),), sigma, device=x.device, dtype=torch.float64)

    for high, low in itertools.pairwise(sigmas):
        x = heun(lambda x, sigma: answer(model, x, sigma, labels), x, level(high), level(low))
    return answer(model, x, level(sigmas[-1]), labels)  # a step of Euler's to σ = 0 gives the denoised image itself


@torch.no_grad()
def sample_call(
    model: ConsistencyModel,
    x: Tensor,
    numbers: Tensor,
    *,
    call: int,
    sigma: float,
    seed: int,
    labels: Tensor | None,
    clip: bool,
) -> Tensor:
    """One network call on images that have had `call` of them: noise of the level is added, and taken away."""
    if call == 0:
        noisy = begin(model, numbers, sigma=sigma, seed=seed, labels=labels)
    else:
        z = rng.normal(numbers, model.image_shape, seed=seed, step=call, stream=Stream.SAMPLING)
        noisy = x + (sigma**2 - model.noise.sigma_min**2) ** 0.5 * z
    x = answer(model, noisy, torch.full((len(x),), sigma, device=x.device), labels)
    return x.clamp(-1, 1) if clip else x


class Generator:
    """A trained model, ready to draw images: what `ict.load` returns."""

    def __init__(self, model: ConsistencyModel, spec: ModelSpec, origin: dict[str, Any] | None = None):
        self.model, self.spec, self.origin = model.eval(), spec, origin or {}

    @property
    def device(self) -> torch.device:
        return self.model.device

    def to(self, device: torch.device | str, *, precision: str = "auto") -> "Generator":
        """On another device, with a net that computes in this precision: float32, tf32, fp16, bf16, or what is best."""
        require(precision in PRECISIONS, f"precision = {precision!r}: use {', '.join(PRECISIONS)}")
        device = pick_device(device)
        if precision == "auto" and self.origin.get("precision") in PRECISIONS:
            precision = self.origin["precision"]  # a model whose numbers leave the range of fp16 says so
        forget(self.model)
        place(self.model, device)
        self.model.precision = pick_precision(precision, device)
        if device.type == "cuda":
            allow_tf32(self.model.precision)
        return self

    def sample(
        self,
        n: int = 1,
        *,
        steps: int | None = None,
        seed: int = 0,
        label: int | str | Sequence[int | str] | None = None,
        sigmas: Sequence[float] | None = None,
        batch: int = 256,
        clip: bool = True,
        progress: Callable[[int], object] | None = None,
    ) -> Tensor:
        """`n` images in [-1, 1] -> float32 [n, C, H, W], on the model's device.

        `steps` network calls an image (1 unless given), or one for each of `sigmas` (falling; from σ_max, or where the
        model has another start, from its level or any above); of a diffusion model, steps of Heun's method (18 unless
        given). `label` is one class for all images or one for each; a model with classes that is given none draws them
        at random. The same seed gives the same images whatever `n` and `batch`: the same noise to the bit, the net's
        answers up to rounding.
        `progress` is called with the number of images drawn so far.
        """
        images, drawn = [], 0
        for some in self.batches(n, steps=steps, seed=seed, label=label, sigmas=sigmas, batch=batch, clip=clip):
            images.append(some)
            drawn += len(some)
            if progress is not None:
                progress(drawn)
        return torch.cat(images)

    def batches(
        self,
        n: int,
        *,
        steps: int | None = None,
        seed: int = 0,
        label: int | str | Sequence[int | str] | None = None,
        sigmas: Sequence[float] | None = None,
        batch: int = 256,
        clip: bool = True,
    ) -> Iterator[Tensor]:
        """The images of `sample`, one batch after the other: for more of them than memory holds.

        What cannot be drawn is refused at once, not with the first batch.
        """
        n, batch, seed = whole("n", n), whole("batch", batch), whole("seed", seed)
        steps = None if steps is None else whole("steps", steps)
        check_count(n)
        require(batch >= 1, f"batch = {batch}: use at least 1")
        require(0 <= seed < 2**63, f"seed = {seed}: use a whole number from 0 to 2^63 - 1")
        require(steps is None or sigmas is None, f"steps = {steps} and sigmas exclude each other: give one of them")
        ladder = check_ladder(self.ladder(steps) if sigmas is None else sigmas, self.spec)
        labels = self.labels(n, label, seed=seed)

        def draw() -> Iterator[Tensor]:
            for numbers in torch.arange(n, device=self.device).split(batch):
                chosen = None if labels is None else labels[numbers]
                yield sample_numbers(self.model, numbers, sigmas=ladder, seed=seed, labels=chosen, clip=clip)

        return draw()

    def ladder(self, steps: int | None = None) -> list[float]:
        """The noise levels of `steps` steps, or of as many as the kind of model usually takes."""
        if self.spec.kind == "diffusion":
            return trajectory(DIFFUSION_STEPS if steps is None else steps, self.spec.noise, first=self.spec.first_sigma)
        steps = 1 if steps is None else steps
        return level_ladder(steps, self.spec.noise, sigma_mid=self.spec.sigma_mid, first=self.spec.first_sigma)

    def labels(self, n: int, label: int | str | Sequence[int | str] | None = None, *, seed: int = 0) -> Tensor | None:
        """The class number of each of n images -> int64 [n], or None for a model without classes."""
        names = self.spec.class_names
        if not names:
            require(label is None, "this model was trained without class labels: leave the label out")
            return None
        if label is None:
            words = rng.words(torch.arange(n), 1, seed=seed, step=0, stream=Stream.LABEL)[:, 0]
            return (words % len(names)).to(self.device)
        require(
            not isinstance(label, Set | Mapping | bytes),
            f"label = {label!r}: give one class, or a list of one for each image",
        )
        single = isinstance(label, str) or getattr(label, "ndim", int(hasattr(label, "__len__"))) == 0
        asked: list[Any] = [label] * n if single else list(label)  # type: ignore
        require(len(asked) == n, f"{len(asked)} labels for {n} images: give one for each, or one for all")
        return torch.tensor([class_number(one, names) for one in asked], device=self.device)


def class_number(label: int | str, names: Sequence[str]) -> int:
    """The number of a class that is given by its name, or by its number."""
    if isinstance(label, str):
        if label in names:
            return list(names).index(label)
        if not label.isdecimal() or len(label) > 9:
            some = ", ".join(map(repr, names[:20])) + f", … ({len(names):,} in all)" * (len(names) > 20)
            raise ConfigError(f"no class is called {label[:50]!r}{suggest(label[:50], names)}: there are {some}")
        label = int(label)
    label = whole("label", label)
    require(0 <= label < len(names), f"label = {label}: this model has classes 0 to {len(names) - 1}")
    return label


def find_model(path: Path, *, ema: float | None = None) -> Path:
    """The model file that a path means: a file, a run's folder, or a checkpoint's folder."""
    if path.is_file():
        require(ema is None, f"{path} is one model file: give the run's folder to choose among its averages (--ema)")
        return path
    require(path.exists(), f"there is no model at {path}: give a model file or the folder of a run")
    newest, finished = list_checkpoints(path), path / "model.safetensors"
    if ema is None and finished.is_file():
        ended = finished_at(finished)
        for one in (one for one in reversed(newest) if step_of(one) > ended):
            with contextlib.suppress(DamagedFile):
                return one / check_checkpoint(one)["model"]
        return finished
    folder = newest[-1] if newest else path
    require(
        bool(newest) or (path / MANIFEST).is_file(),
        f"{path} holds no model: give a model file or the folder of a run that has saved one",
    )
    manifest = check_checkpoint(folder)
    if ema is None:
        return folder / manifest["model"]
    rates = manifest["recipe"]["training"]["ema"]
    require(ema in rates, f"ema = {ema}: {folder} has the rates {', '.join(map(str, sorted(rates)))}")
    return folder / average_name(ema)


def finished_at(model: Path) -> float:
    """The step that a finished model is of; a run that was made longer has checkpoints past it."""
    step = read_origin(model).get("step")
    return step if isinstance(step, int) else math.inf


def load(
    path: str | Path, *, ema: float | None = None, device: torch.device | str = "cpu", precision: str = "auto"
) -> Generator:
    """The generator in a model file, a checkpoint or a run's folder: its finished model, or a checkpoint past that.

    `ema` picks one of the averages in the newest checkpoint.
    """
    return Generator(*read_model(find_model(Path(path).expanduser(), ema=ema))).to(device, precision=precision)
