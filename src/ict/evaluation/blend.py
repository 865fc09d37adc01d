"""A better average out of several (post-hoc EMA): a linear combination of those that a run has kept.

Each average weighs the steps of a run by its own falling exponential; a sum of them, some with a negative share, weighs
them by a curve of another shape, whose best form nobody knows before the run. It costs no training, only scores.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from ict.device import pick_device
from ict.evaluation.evaluate import Plan, data_of, open_judge
from ict.evaluation.judge import Judge, draw, look
from ict.evaluation.metrics import frechet_distance
from ict.files import check_target, list_checkpoints, write_atomically
from ict.model import pack_model, read_model
from ict.reading import ConfigError, require
from ict.sampling import Generator
from ict.training.checkpoint import MANIFEST, average_name, check_checkpoint

Shares = tuple[float, ...]
STEP, FINEST = 0.25, 0.05  # how far a share is moved at first, and at last
LARGEST = 100.0  # share: beyond that a slip of the pen


def blend(averages: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
    """Σ share · weights, summed in float64 -> each as it was."""
    return {
        name: sum(share * one[name].double() for share, one in zip(shares, averages, strict=True)).to(first)  # type: ignore
        for name, first in averages[0].items()
    }


def directions(count: int) -> Iterator[Shares]:
    """Ways to change shares, in the order of the rates, whose sum stays: from one's neighbour, or from both of them."""
    for i in range(count - 1):
        yield tuple((j == i) - (j == i + 1) + 0.0 for j in range(count))
    for i in range(1, count - 1):
        yield tuple((j == i) - 0.5 * (abs(j - i) == 1) for j in range(count))


def search(score: Callable[[Shares], float], begin: Shares, *, tries: int) -> tuple[Shares, float]:
    """The best shares found: goes on in any direction that helps, and by smaller steps where none does."""
    tried: dict[Shares, float] = {begin: score(begin)}
    best, step = begin, STEP
    while step >= FINEST:
        before = best
        for way in (way for one in directions(len(begin)) for way in (one, tuple(-x for x in one))):
            if len(tried) >= tries:
                return best, tried[best]
            there = tuple(round(share + step * x, 6) for share, x in zip(best, way, strict=True))
            if there not in tried:
                tried[there] = score(there)
            if tried[there] < tried[best]:
                best = there
        if best == before:
            step /= 2
    return best, tried[best]


def parse_shares(text: str, rates: Sequence[float]) -> Shares:
    """ "0.9998:1.25,0.9999:-0.25" -> a share for each of the rates; they must add up to 1."""
    try:
        found = {float(rate): float(share) for rate, share in (one.split(":") for one in text.split(","))}
    except ValueError:
        raise ConfigError(f"--shares {text}: give each average its share, like 0.9998:1.25,0.9999:-0.25") from None
    unknown = [rate for rate in found if rate not in rates]
    require(not unknown, f"--shares {text}: the run has the averages {', '.join(map(str, rates))}")
    require(len(found) == len(text.split(",")), f"--shares {text}: an average is named twice")
    require(all(abs(share) <= LARGEST for share in found.values()), f"--shares {text}: use -{LARGEST:g} to {LARGEST:g}")
    require(abs(sum(found.values()) - 1) < 1e-6, f"--shares {text}: they add up to {sum(found.values()):g}, not to 1")
    return tuple(found.get(rate, 0.0) for rate in rates)


def show_shares(shares: Shares, rates: Sequence[float]) -> str:
    return ",".join(f"{rate}:{share:g}" for rate, share in zip(rates, shares, strict=True) if share)


def run_blend(
    model: Path,
    *,
    shares: str | None,
    data: str | None,
    data_path: str,
    split: str | None,
    steps: tuple[int, ...],
    samples: int,
    tries: int,
    seed: int,
    features: str | None,
    weights: Path | None,
    batch: int,
    write: Path | None,
    device: str,
) -> None:
    """What `ict blend` does."""
    plan = Plan(steps=steps, samples=samples, seed=seed, batch=batch)
    require(tries >= 1, f"--tries {tries}: use at least 1")
    require(shares is None or write is not None, "--shares says which blend: say with --write where it goes")
    if write is not None:
        check_target("--write", write)
    place, console = pick_device(device), Console()
    require(model.exists(), f"there is no run at {model}")
    newest = [model, *list_checkpoints(model)][-1]
    require(
        (newest / MANIFEST).is_file(),
        f"{model} holds no averages: give the folder of a run that has saved a checkpoint",
    )
    usual, *others = check_checkpoint(newest)["recipe"]["training"]["ema"]
    rates = sorted([usual, *others])
    require(bool(others), f"{model} has kept one average, {usual}: give several in training.ema to blend them")
    found = [read_model(newest / average_name(rate)) for rate in rates]
    averages = [{name: one.to(place, copy=True) for name, one in each.state_dict().items()} for each, _, _ in found]
    generator = Generator(*found[0]).to(place)
    if shares is not None:
        best = parse_shares(shares, rates)
    else:
        for each in steps:
            generator.ladder(each)  # refused before images are looked at
        config = data_of(model, data, data_path, split, generator)
        judge = open_judge(config, features=features, weights=weights, device=place, samples=samples)
        begin = tuple(float(rate == usual) for rate in rates)
        best = find_shares(generator, averages, rates, judge, plan, begin, tries=tries, console=console)
        print(f"best: --shares {show_shares(best, rates)}")
    if write is not None:
        origin = {**generator.origin, "ema": show_shares(best, rates)}
        generator.model.load_state_dict(blend(averages, best))
        write_atomically(write, pack_model(generator.spec, generator.model.cpu().state_dict(), origin))
        print(f"model: {write}")


def find_shares(
    generator: Generator,
    averages: Sequence[Mapping[str, Tensor]],
    rates: Sequence[float],
    judge: Judge,
    plan: Plan,
    begin: Shares,
    *,
    tries: int,
    console: Console,
) -> Shares:
    """The search with samples of a generator, whose weights it changes; each try is told of."""

    def score(given: Shares) -> float:
        generator.model.load_state_dict(blend(averages, given))
        try:
            found = score_of(generator, judge, plan)
        except ConfigError:  # samples that are not numbers: too far out
            found = [math.inf]
        text = " / ".join(f"{one:.3f}" for one in found)
        console.print(f"  {show_shares(given, rates)}   {judge.net.frechet} {text}", highlight=False, soft_wrap=True)
        return sum(found)

    return search(score, begin, tries=tries)[0]


@torch.inference_mode()
def score_of(generator: Generator, judge: Judge, plan: Plan) -> list[float]:
    """The Fréchet distance of samples, for each number of steps of a plan."""
    labels = judge.labels(generator, plan.samples, seed=plan.seed)
    found = []
    for steps in plan.steps:
        drawn = draw(generator, labels, generator.ladder(steps), plan.samples, plan.seed, plan.batch)
        found.append(frechet_distance(look(drawn, judge.net).moments, judge.real.moments))
    return found
