"""What `ict eval` and `ict tune` do, from paths and options to tables."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ict.config import NATURAL, DataConfig
from ict.data import Images, load_images
from ict.data.prepare import read_manifest
from ict.device import pick_device
from ict.display import DataProgress
from ict.evaluation.evaluate import Plan, data_of, evaluate, evaluate_images, load_models, open_judge, run_of
from ict.evaluation.judge import Judge
from ict.evaluation.records import Record, add_record, check_place, published_rows, score_names, with_spread
from ict.evaluation.report import write_report
from ict.evaluation.tune import tune
from ict.files import check_target, write_atomically
from ict.model import pack_model
from ict.ranks import Ranks, device_of_rank, join_ranks, rank_of_environment
from ict.reading import ConfigError, require
from ict.recipes import load_recipe
from ict.sampling import Generator

Averages = Sequence[float] | str | None


def run_eval(
    model: Path | None,
    images: str | None,
    *,
    data: str | None,
    data_path: str,
    split: str | None,
    features: str | None,
    weights: Path | None,
    device: str,
    ema: Averages,
    checkpoints: bool,
    out: Path | None,
    **plan: Any,
) -> None:
    """Score, on one rank or on many; the main one writes and speaks."""
    place = device_of_rank(pick_device(device))
    console = Console(quiet=not rank_of_environment().main)
    if out is not None:
        check_place(out)
    if images is not None:
        require(rank_of_environment().count == 1, "--images is scored by one process: start it without torchrun")
        config, saved = saved_images(images, data, data_path, split)
        judge = open_judge(config, features=features, weights=weights, device=place, samples=len(saved))
        with DataProgress("looking at the images", total=len(saved)) as progress:
            record = evaluate_images(saved, judge, name=images, progress=lambda done: progress(done, len(saved)))
        if out is not None:
            add_record(out, record)
        show(console, [record], judge)
        return
    assert model is not None
    with join_ranks(place) as ranks:
        evaluate_models(
            ranks, place, console, model, data=data, data_path=data_path, split=split, features=features,
            weights=weights, ema=ema, checkpoints=checkpoints, out=out, wanted=Plan(**plan),
        )  # fmt: skip


def evaluate_models(
    ranks: Ranks,
    place: torch.device,
    console: Console,
    model: Path,
    *,
    data: str | None,
    data_path: str,
    split: str | None,
    features: str | None,
    weights: Path | None,
    ema: Averages,
    checkpoints: bool,
    out: Path | None,
    wanted: Plan,
) -> None:
    models = load_models(model, ema=ema, checkpoints=checkpoints, device=place)
    first = next(models)  # the real images are made to its size
    config = data_of(model, data, data_path, split, first[1])
    path = out or (run_of(model) or model.resolve().parent) / "eval.json"
    check_place(path)
    judge = open_judge(config, features=features, weights=weights, device=place, samples=wanted.samples)
    records: list[Record] = []
    with DataProgress("", total=wanted.samples, quiet=not ranks.main) as bar:

        def show_progress(name: str, text: str, done: int) -> None:
            bar.name(f"{name}: {text}")
            bar(done, wanted.samples)

        for name, generator in chain([first], models):
            tell = partial(show_progress, name)
            for record in evaluate(generator, judge, wanted, name=name, ranks=ranks, progress=tell):
                if ranks.main:
                    add_record(path, record)
                records.append(record)
    if not ranks.main:
        return
    show(console, records, judge)
    print(f"scores: {path}")
    run = run_of(model)
    if run is not None and out is None and (run / "log.jsonl").is_file():
        learned = load_recipe(run / "recipe.toml").data
        own = judge.images if config == learned else load_images(learned)
        print(f"page: {write_report(run, own, device=place)}")


def saved_images(images: str, data: str | None, data_path: str, split: str | None) -> tuple[DataConfig, Images]:
    """Saved images as they are, and the real ones at the same size."""
    require(data is not None, "--data: say which real images to compare with")
    assert data is not None
    size, channels = NATURAL[data] if data in NATURAL else (size_of(images), 3)
    config = DataConfig(source=data, path=data_path, split=split or "train", image_size=size, channels=channels)
    with DataProgress() as progress:
        saved = load_images(DataConfig(source=images, image_size=size, channels=channels), progress)
    shapes = {tuple(found) for found in extremes(saved)}
    require(
        shapes <= {(size, size)},
        f"--images {images} has images of {', '.join(f'{w}×{h}' for w, h in sorted(shapes))} pixels, the real ones "
        f"have {size}×{size}: a score of resized images means nothing; save them at that size",
    )
    return config, saved


def size_of(images: str) -> int:
    """The size of saved images, for a real set that has none of its own."""
    first = load_images(DataConfig(source=images, image_size=64, channels=3))
    (width, height), *_ = extremes(first)
    require(width == height, f"--images {images}: {width}×{height} pixels; square images can be compared")
    return width


def extremes(images: Images) -> list[tuple[int, int]]:
    """Widths and heights that the images of a pile had: the smallest and the largest."""
    if images.file is None:
        return [images.shape[2:0:-1]]  # type: ignore
    sizes = read_manifest(images.file.path.parent)["sizes"]
    return [tuple(sizes["smallest"]), tuple(sizes["largest"]), tuple(sizes["common"][0])]


def show(console: Console, records: list[Record], judge: Judge) -> None:
    """A table of scores, with the paper's beside them where it has any."""
    names = score_names(records)
    suffix = f"-{judge.net.name}"  # said once, below the table
    table = Table("model", "step", "EMA", "calls", box=None)
    for name in names:
        table.add_column(name.removesuffix(suffix), no_wrap=True, min_width=7)
    for record in records:
        step = "" if record["step"] is None else f"{record['step']:,}"
        ema = "" if record["ema"] is None else str(record["ema"])
        cells = [Text(record["model"]), step, ema, str(len(record["sigmas"]) or "–")]
        table.add_row(*cells, *(with_spread(name, record["scores"], subsets=False) for name in names))
    for name, calls, scores in published_rows(judge.source, names):
        table.add_row(
            f"{name}, published", "", "", str(calls), *(with_spread(one, scores) for one in names), style="dim"
        )
    # Numbers are never cut off: a narrow terminal breaks the lines itself.
    wide = Console(width=max(console.width, 160), soft_wrap=True) if not console.is_terminal else console
    wide.print(table)
    samples = records[0]["samples"]
    few = judge.net.name == "inception" and samples < 50_000
    console.print(
        f"{samples:,} samples against {len(judge.images):,} real images, by the features of {judge.net.name}"
        + ("; fewer than the papers' 50,000, so FID is biased upwards" if few else ""),
        style="dim",
        highlight=False,
    )


def run_tune(
    model: Path,
    *,
    data: str | None,
    data_path: str,
    split: str | None,
    steps: int,
    samples: int,
    first: int,
    ema: Averages,
    seed: int,
    features: str | None,
    weights: Path | None,
    batch: int,
    write: Path | None,
    device: str,
) -> None:
    place, console = pick_device(device), Console()
    Plan(steps=(steps,), samples=samples, seed=seed, batch=batch)  # the same limits
    require(steps >= 2, f"--steps {steps}: one step has no level to choose; use 2 or more")
    if write is not None:
        check_target("--write", write)
    require(write is None or steps == 2, "--write keeps the level of two steps: leave it out, or use --steps 2")
    judge: Judge | None = None
    best: tuple[float, list[float], Generator] | None = None
    for name, generator in load_models(model, ema=ema, checkpoints=False, device=place):
        require(
            generator.spec.kind != "diffusion",
            f"{model} is a diffusion model, which is solved along a fixed grid: ict tune is for consistency models",
        )
        if judge is None:
            config = data_of(model, data, data_path, split, generator)
            judge = open_judge(config, features=features, weights=weights, device=place, samples=min(first, samples))
        label = judge.net.frechet

        def say(sigma: float, score: float, count: int, label: str = label) -> None:
            console.print(f"  σ = {sigma:8.4f}   {label} {score:8.3f}   ({count:,} samples)", highlight=False)

        console.print(Text(f"{name}, EMA {generator.origin.get('ema')}"))
        sigmas, score = tune(
            generator, judge, steps=steps, samples=samples, first=first, seed=seed, batch=batch, say=say
        )
        console.print(f"  best: {', '.join(f'{s:.4f}' for s in sigmas)}   {label} {score:.3f}", highlight=False)
        if best is None or score < best[0]:
            best = (score, sigmas, generator)
    if best is None:
        raise ConfigError(f"{model} holds no model")
    score, sigmas, generator = best
    levels = ",".join(f"{sigma:.6g}" for sigma in sigmas)
    print(f"best: EMA {generator.origin.get('ema')}, --sigmas {levels}")
    if write is not None:
        spec = replace(generator.spec, sigma_mid=sigmas[-1])
        write_atomically(write, pack_model(spec, generator.model.cpu().state_dict(), generator.origin))
        print(f"model with that level: {write}")
