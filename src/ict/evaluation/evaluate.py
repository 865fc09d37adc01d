"""`ict eval`: which models, how many samples, against what; one record for each."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ict.config import DataConfig
from ict.data import Images, load_images
from ict.display import DataProgress
from ict.evaluation.features import open_features, usual_features
from ict.evaluation.judge import Judge, summary
from ict.evaluation.records import Record
from ict.files import list_checkpoints
from ict.ranks import ALONE, Ranks
from ict.reading import require
from ict.recipes import load_recipe
from ict.sampling import Generator, check_count, load
from ict.training.checkpoint import MANIFEST, check_checkpoint


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is drawn from each model."""

    steps: tuple[int, ...] = (1,)
    sigmas: list[float] | None = None  # instead of steps
    samples: int = 50_000
    seed: int = 0
    repeats: int = 1
    batch: int = 250

    def __post_init__(self) -> None:
        steps = ",".join(map(str, self.steps))
        require(bool(self.steps) and 1 <= min(self.steps) <= max(self.steps) <= 1000, f"--steps {steps}: use 1 to 1000")
        check_count(self.samples)
        require(0 <= self.seed <= 2**62, f"--seed {self.seed}: use a whole number from 0 to 2^62")
        require(self.repeats >= 1, f"--repeats {self.repeats}: use at least 1")
        require(self.batch >= 1, f"--batch {self.batch}: use at least 1")


def run_of(model: Path) -> Path | None:
    """The folder of the run that a model belongs to."""
    for folder in (model, *list(model.parents)[:3], *list(model.resolve().parents)[:3]):
        if (folder / "recipe.toml").is_file():
            return folder
    return None


def data_of(model: Path, source: str | None, path: str, split: str | None, generator: Generator) -> DataConfig:
    """The real images to compare with: those that were asked for, or those that the run learned from."""
    run = run_of(model)
    learned = load_recipe(run / "recipe.toml").data if run is not None else None
    if source is None:
        require(learned is not None, "--data: say which real images to compare with")
        assert learned is not None
        return replace(learned, path=path or learned.path, split=split or learned.split)
    size, channels = generator.spec.image_size, generator.spec.channels
    asked = DataConfig(source=source, path=path, split=split or "train", image_size=size, channels=channels)
    if learned is None:
        return asked
    known = learned.path if learned.source == source else ""
    return replace(asked, path=path or known, fit=learned.fit, background=learned.background)


def open_judge(
    config: DataConfig,
    *,
    features: str | None,
    weights: Path | None,
    device: torch.device,
    samples: int,
    images: Images | None = None,
) -> Judge:
    """The feature net first: without its weights nothing need be decoded (where `images` are not given) or drawn."""
    net = open_features(features or usual_features(config.source), weights=weights, device=device)
    if images is None:
        with DataProgress() as progress:
            images = load_images(replace(config, classes=0), progress)
    count = len(images)
    # The papers' rows stand beside the training images alone.
    source = config.source if config.split == "train" else f"{config.source} ({config.split})"
    with DataProgress("looking at the real images", total=count) as progress:
        return Judge.of(images, net, samples=samples, source=source, progress=lambda done: progress(done, count))


def models_of(
    model: Path, *, ema: Sequence[float] | str | None, checkpoints: bool
) -> Iterator[tuple[Path, float | None]]:
    """Paths and averages that `load` takes: one model, or all averages, or all checkpoints."""
    places = list_checkpoints(model) if checkpoints else [model]
    require(bool(places), f"{model} holds no checkpoints")
    for place in places:
        if ema == "all":
            newest = [place, *list_checkpoints(place)][-1]
            require((newest / MANIFEST).is_file(), f"{place} is no run with checkpoints: leave --ema out")
            rates = check_checkpoint(newest)["recipe"]["training"]["ema"]
            yield from ((place, rate) for rate in rates)
        elif ema:
            yield from ((place, float(rate)) for rate in ema)
        else:
            yield place, None


def evaluate(
    generator: Generator,
    judge: Judge,
    plan: Plan,
    *,
    name: str,
    progress: Callable[[str, int], object] | None = None,
    ranks: Ranks = ALONE,
) -> Iterator[Record]:
    """Score one model as the plan says: a record for each number of steps."""
    ladders = [plan.sigmas] if plan.sigmas else [generator.ladder(steps) for steps in plan.steps]
    for sigmas in ladders:
        begun = time.perf_counter()
        scores = []
        for seed in range(plan.seed, plan.seed + plan.repeats):
            text = f"{len(sigmas)} step{'s' * (len(sigmas) > 1)}, seed {seed}"
            tell = None if progress is None else partial(progress, text)
            options = {"samples": plan.samples, "sigmas": sigmas, "seed": seed, "batch": plan.batch, "ranks": ranks}
            scores.append(judge.judge(generator, **options, progress=tell))
        yield {
            "model": name,
            "run": generator.origin.get("run"),
            "step": generator.origin.get("step"),
            "ema": generator.origin.get("ema"),
            "sigmas": [round(sigma, 6) for sigma in sigmas],
            "samples": plan.samples,
            "seeds": list(range(plan.seed, plan.seed + plan.repeats)),
            **about(judge),
            "scores": summary(scores),
            "seconds": round(time.perf_counter() - begun, 1),
        }


def about(judge: Judge) -> dict[str, Any]:
    """What every record says of its measure."""
    return {
        "features": judge.net.name,
        "weights": judge.net.checksum,
        "real": {"source": judge.source, "count": len(judge.images), "checksum": judge.images.checksum},
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "torch": torch.__version__,
    }


def evaluate_images(images: Images, judge: Judge, *, name: str, progress: Callable[[int], object] | None) -> Record:
    """Score saved images."""
    begun = time.perf_counter()
    scores = judge.judge_images(images, progress=progress)
    return {
        "model": name, "run": None, "step": None, "ema": None, "sigmas": [], "samples": len(images), "seeds": [],
        **about(judge), "scores": scores, "seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip


def load_models(
    model: Path, *, ema: Sequence[float] | str | None, checkpoints: bool, device: torch.device
) -> Iterator[tuple[str, Generator]]:
    """Each model with a name that tells it apart within its run."""
    for place, rate in models_of(model, ema=ema, checkpoints=checkpoints):
        name = "checkpoint" if checkpoints else model.resolve().name
        yield name, load(place, ema=rate, device=device)
