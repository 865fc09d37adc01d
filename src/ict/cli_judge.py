"""The commands that score: `ict eval`, `ict tune` and `ict blend`. Torch is imported inside of them."""

from pathlib import Path
from typing import Annotated

import typer

from ict.reading import ConfigError, require

DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto takes the GPU where there is one.")]
DataOption = Annotated[
    str | None, typer.Option("--data", help="Real images: a path or a name; the run's own unless given.")
]
DataPathOption = Annotated[str, typer.Option(help="Where cifar10 or imagenet64 is, if not where the run had it.")]
FeaturesOption = Annotated[
    str | None, typer.Option(help="Compare by: inception (FID), digits, dinov2; what suits the data unless given.")
]
WeightsOption = Annotated[
    Path | None, typer.Option("--weights", "--inception", help="Weights of the feature net, if not in the cache.")
]


def eval_(
    model: Annotated[Path | None, typer.Argument(help="A model file, or the folder of a run.")] = None,
    images: Annotated[str | None, typer.Option(help="Score these saved images instead of a model.")] = None,
    data: DataOption = None,
    data_path: DataPathOption = "",
    split: Annotated[str | None, typer.Option(help="Which part of the real images.")] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="N,…", help="Network calls a sample: 1 unless given; 1,2 scores both.")
    ] = None,
    sigmas: Annotated[
        str | None, typer.Option(metavar="S1,S2,…", help="Noise levels of the calls, instead of --steps.")
    ] = None,
    samples: Annotated[int, typer.Option(help="How many samples; the papers use 50,000.")] = 50_000,
    repeats: Annotated[int, typer.Option(help="Repeat with so many seeds, and give mean and deviation.")] = 1,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    ema: Annotated[str | None, typer.Option(help="Which of the run's averages: a rate, several, or all.")] = None,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Score every checkpoint of the run.")] = False,
    features: FeaturesOption = None,
    weights: WeightsOption = None,
    batch: Annotated[int, typer.Option(help="Images computed at a time.")] = 250,
    out: Annotated[Path | None, typer.Option(help="Where the scores go; eval.json of the run unless given.")] = None,
    device: DeviceOption = "auto",
) -> None:
    require((model is None) != (images is None), "give a model to score, or --images with saved ones")

    from ict.evaluation.command import run_eval

    calls = parse_steps("1" if steps is None else steps)
    require(steps is None or sigmas is None, "--steps and --sigmas exclude each other: give one of them")
    require(
        images is None or (ema is None and not checkpoints and sigmas is None),
        "--images scores saved images: --ema, --checkpoints and --sigmas are for models",
    )
    ladder = parse_sigmas(sigmas)
    run_eval(
        model, images, data=data, data_path=data_path, split=split, steps=calls, sigmas=ladder, samples=samples,
        repeats=repeats, seed=seed, ema=parse_averages(ema), checkpoints=checkpoints, features=features,
        weights=weights, batch=batch, out=out, device=device,
    )  # fmt: skip


def tune(
    model: Annotated[Path, typer.Argument(help="The folder of a run, or a model file.")],
    data: DataOption = None,
    data_path: DataPathOption = "",
    split: Annotated[str | None, typer.Option(help="Which part of the real images.")] = None,
    steps: Annotated[int, typer.Option(help="Network calls a sample.")] = 2,
    samples: Annotated[int, typer.Option(help="Samples of the fine search.")] = 10_000,
    first: Annotated[int, typer.Option(help="Samples of the first, coarse look.")] = 5_000,
    ema: Annotated[str | None, typer.Option(help="Averages to choose among: rates, or all.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of the samples.")] = 0,
    features: FeaturesOption = None,
    weights: WeightsOption = None,
    batch: Annotated[int, typer.Option(help="Images computed at a time.")] = 250,
    write: Annotated[Path | None, typer.Option(help="Write the best model with its level to this file.")] = None,
    device: DeviceOption = "auto",
) -> None:
    require(write is None or write.suffix == ".safetensors", f"--write {write}: name a .safetensors file")

    from ict.evaluation.command import run_tune

    run_tune(
        model, data=data, data_path=data_path, split=split, steps=steps, samples=samples, first=first,
        ema=parse_averages(ema), seed=seed, features=features, weights=weights, batch=batch, write=write, device=device,
    )  # fmt: skip


def blend(
    model: Annotated[Path, typer.Argument(help="The folder of a run that keeps several averages (training.ema).")],
    shares: Annotated[
        str | None,
        typer.Option(metavar="RATE:SHARE,…", help="This combination, without a search: 0.9998:1.25,0.9999:-0.25."),
    ] = None,
    data: DataOption = None,
    data_path: DataPathOption = "",
    split: Annotated[str | None, typer.Option(help="Which part of the real images.")] = None,
    steps: Annotated[
        str, typer.Option(metavar="N,…", help="Network calls a sample; several: the sum of their scores counts.")
    ] = "1,2",
    samples: Annotated[int, typer.Option(help="Samples that each try is scored by.")] = 10_000,
    tries: Annotated[int, typer.Option(help="Combinations that are tried, at most.")] = 60,
    seed: Annotated[int, typer.Option(help="The seed of the samples; not the one that is judged in the end.")] = 1,
    features: FeaturesOption = None,
    weights: WeightsOption = None,
    batch: Annotated[int, typer.Option(help="Images computed at a time.")] = 250,
    write: Annotated[Path | None, typer.Option(help="Write the best model to this file.")] = None,
    device: DeviceOption = "auto",
) -> None:
    require(write is None or write.suffix == ".safetensors", f"--write {write}: name a .safetensors file")

    from ict.evaluation.blend import run_blend

    run_blend(
        model, shares=shares, data=data, data_path=data_path, split=split, steps=parse_steps(steps), samples=samples,
        tries=tries, seed=seed, features=features, weights=weights, batch=batch, write=write, device=device,
    )  # fmt: skip


def parse_steps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(one) for one in text.split(","))
    except ValueError:
        raise ConfigError(f"--steps {text}: give whole numbers with commas between them, like 1,2") from None


def parse_sigmas(text: str | None) -> list[float] | None:
    return None if text is None else parse_numbers("--sigmas", text, example="80,0.8")


def parse_averages(text: str | None) -> list[float] | str | None:
    return text if text in (None, "all") else parse_numbers("--ema", text, example="0.999,0.9999")


def parse_numbers(option: str, text: str, *, example: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text}: give numbers with commas between them, like {example}") from None
