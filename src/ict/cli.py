"""The command line: parse, call, print. Torch is imported inside the commands that need it."""

import errno
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ict.cli_data import data
from ict.cli_judge import DeviceOption, blend, eval_, parse_sigmas, tune
from ict.files import DamagedFile, check_target, explain, holds_run
from ict.frontpage import COMMANDS, page
from ict.reading import ConfigError, parse_duration, printable, require
from ict.recipes import find_recipe, list_recipes, load_recipe

if TYPE_CHECKING:
    from torch import Tensor

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=page())
app.add_typer(data, name="data", help=COMMANDS["data"])

RecipeArgument = Annotated[str, typer.Argument(help="A recipe's name, a path to a .toml, or the folder of a run.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key: --set training.batch=64.")
]


def run_command() -> int:
    """Run the command line; errors of the user's end with a message and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore  # a terminal without → and σ still gets the rest
    try:
        app(args=with_auto(sys.argv[1:]))
    except (ConfigError, DamagedFile) as error:
        return fail(str(error))
    except OSError as error:
        return fail(advise(error))
    except RuntimeError as error:
        kind = type(error).__name__  # known by name: importing the classes would load torch
        if kind == "OutOfMemoryError":
            return fail(f"{str(error).splitlines()[0]} Raise training.accumulate, or lower training.batch or --batch")
        if kind != "TrainingFailed":
            raise
        return fail(str(error), code=1)
    return 0


def with_auto(arguments: list[str]) -> list[str]:
    """`--resume auto` as one word: an option here has a value always or never."""
    found: list[str] = []
    for argument in arguments:
        if argument == "--resume=auto":
            found.append("--resume-auto")
        elif argument == "auto" and found[-1:] == ["--resume"]:
            found[-1] = "--resume-auto"
        elif argument.startswith("--resume="):
            raise ConfigError(f"{argument}: write --resume, or --resume auto")
        else:
            found.append(argument)
    return found


def fail(message: str, *, code: int = 2) -> int:
    print(f"error: {printable(message)}", file=sys.stderr)  # names in other people's files may hold anything
    return code


def advise(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        rest = "Free some space and try again; a run goes on from its last good checkpoint with --resume"
        return f"{explain(error)}. {rest}"
    return explain(error)


@app.command(help=COMMANDS["train"])
def train(
    recipe: RecipeArgument,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/NAME unless given.")] = None,
    steps: Annotated[int | None, typer.Option(help="Train for so many steps.")] = None,
    images: Annotated[int | None, typer.Option(help="Train on so many images.")] = None,
    budget: Annotated[str | None, typer.Option(help="Train for so long: 90s, 3m, 1h30m.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest good checkpoint; `--resume auto`: if there is one.")
    ] = False,
    resume_auto: Annotated[bool, typer.Option("--resume-auto", hidden=True)] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run in the same folder.")] = False,
    device: DeviceOption = "auto",
    set_: SetOption = None,
) -> None:
    bounds = {"training.steps": steps, "training.images": images, "training.budget": budget}
    given = [f"{key}={value}" for key, value in bounds.items() if value is not None]
    require(len(given) <= 1, "--steps, --images and --budget exclude each other: bound the run by one of them")
    if budget is not None:
        parse_duration("--budget", budget)
        given = [f'training.budget="{budget}"']
    given += [] if seed is None else [f"seed={seed}"]
    source = find_recipe(recipe)
    config = load_recipe(source, [*(set_ or []), *given])
    if out is None:  # the recipe of a run belongs to that run
        ours = source.name == "recipe.toml" and holds_run(source.parent)
        out = source.parent if ours else Path("runs") / config.name
    require(str(out) != "." or source.parent == out, "--out: give the run's folder a name")

    from ict.experiment import run

    try:
        run(config, out, device=device, resume="auto" if resume_auto else resume, overwrite=overwrite)
    except KeyboardInterrupt as stop:
        raise typer.Exit(getattr(stop, "code", 130)) from None


@app.command(help=COMMANDS["sample"])
def sample(
    model: Annotated[Path, typer.Argument(help="A model file, or the folder of a run.")],
    count: Annotated[int, typer.Option("--count", "-n", help="How many images.")] = 64,
    steps: Annotated[
        int | None, typer.Option(help="Network calls an image: 1 unless given (18 steps for a diffusion model).")
    ] = None,
    sigmas: Annotated[
        str | None, typer.Option(metavar="S1,S2,…", help="Noise levels of the calls, instead of --steps: 80,0.8.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Class of the images, by name or number; several, like 0,1,2, take turns.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same images.")] = 0,
    out: Annotated[Path, typer.Option(help="A .png for one sheet, or a folder for single files.")] = Path(
        "samples.png"
    ),
    columns: Annotated[int | None, typer.Option(help="Images in a row of the sheet.")] = None,
    scale: Annotated[int | None, typer.Option(help="Pixels of the sheet for each pixel of an image.")] = None,
    ema: Annotated[
        float | None, typer.Option(help="Which of the run's averages; the recipe's first unless given.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Images computed at a time.")] = 256,
    precision: Annotated[str, typer.Option(help="What the net computes in: float32, tf32, fp16, bf16.")] = "auto",
    device: DeviceOption = "auto",
) -> None:
    ladder = parse_sigmas(sigmas)
    sheet = out.suffix.lower() == ".png"
    require(
        sheet or out.suffix.lower() not in PICTURES,
        f"--out {out}: pictures are written as .png; give a .png or a folder",
    )
    require(steps is None or ladder is None, "--steps and --sigmas exclude each other: give one of them")
    require(columns is None or columns >= 1, f"--columns {columns}: use at least 1")
    require(scale is None or scale >= 1, f"--scale {scale}: use at least 1")
    check_target("--out", out, folder=not sheet)

    from ict.display import DataProgress
    from ict.files import write_atomically
    from ict.pictures import comfortable_scale, grid, is_points, png, sheet_shape
    from ict.sampling import check_count, load

    generator = load(model, ema=ema, device=device, precision=precision)
    check_count(count)
    shape, names = generator.model.image_shape, generator.spec.class_names
    if sheet:
        scale = scale or comfortable_scale(generator.spec.image_size)
        if not is_points(shape):
            sheet_shape(count, (shape[1] * scale, shape[2] * scale), columns=columns)
    files = [] if sheet else single_files(out, count)
    asked = [] if label is None else [label] if label in names else label.split(",")
    labels = [one.strip() for one in itertools.islice(itertools.cycle(asked), count)] or None
    options = {"steps": steps, "seed": seed, "label": labels, "sigmas": ladder, "batch": batch}
    if sheet:
        with DataProgress("drawing", total=count) as bar:
            images = generator.sample(count, **options, progress=lambda drawn: bar(drawn, count))
        write_atomically(out, png(grid(images, columns=columns, scale=scale or 1)))
    else:
        draw_files(generator.batches(count, **options), files, out, scale=scale or 1)
    print(f"{count} images: {out}")


PICTURES = (".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".svg", ".pdf", ".avif", ".jxl", ".heic", ".ppm")


def draw_files(drawn: Iterator["Tensor"], names: list[str], folder: Path, *, scale: int) -> None:
    """Each image in a file of its own, written as soon as it is drawn: those that are there stay if it is stopped."""
    from ict.display import DataProgress
    from ict.files import sync_folder, write_atomically
    from ict.pictures import grid, png

    done = 0
    try:
        with DataProgress("drawing", total=len(names)) as progress:
            for some in drawn:
                for old in names if done == 0 else []:  # of an earlier draw: the two must not mix
                    (folder / old).unlink(missing_ok=True)
                for image in some.cpu():
                    write_atomically(folder / names[done], png(grid(image[None], scale=scale)), sync=False)
                    done += 1
                progress(done, len(names))
        sync_folder(folder)
    except KeyboardInterrupt:
        print(f"stopped: {done:,} of {len(names):,} images are in {folder}", file=sys.stderr)
        raise typer.Exit(130) from None


def single_files(folder: Path, count: int) -> list[str]:
    """Names for so many images in a folder, which must not hold anything else: it may be scored as a whole."""
    digits = max(5, len(str(count - 1)))
    names = [f"{number:0{digits}d}.png" for number in range(count)]
    other = sorted({path.name for path in folder.glob("[!.]*")} - set(names)) if folder.is_dir() else []
    some = ", ".join(other[:3]) + ", …" * (len(other) > 3)
    require(not other, f"--out {folder} holds other files ({some}): give an empty folder")
    return names


for name, command in (("eval", eval_), ("tune", tune), ("blend", blend)):
    app.command(name, help=COMMANDS[name])(command)


@app.command(help=COMMANDS["report"])
def report(run: Annotated[Path, typer.Argument(help="The folder of a run.")], device: DeviceOption = "auto") -> None:
    require((run / "recipe.toml").is_file(), f"{run} is not the folder of a run: there is no recipe.toml in it")
    config = load_recipe(run / "recipe.toml")

    from ict.data import load_images
    from ict.device import pick_device
    from ict.evaluation.report import write_report

    print(write_report(run, load_images(config.data), device=pick_device(device)))


@app.command(help=COMMANDS["bench"])
def bench(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or file.")],
    batch: Annotated[int | None, typer.Option(help="Images a step; the recipe's unless given.")] = None,
    steps: Annotated[int, typer.Option(help="Steps that are timed, after the first ten.")] = 20,
    set_: SetOption = None,
    device: DeviceOption = "auto",
) -> None:
    require(batch is None or batch >= 1, f"--batch {batch}: use at least 1")
    require(steps >= 1, f"--steps {steps}: use at least 1")
    config = load_recipe(find_recipe(recipe), set_ or [])

    from rich.console import Console

    from ict.bench import bench as run_bench
    from ict.bench import table
    from ict.device import pick_device

    console = Console()
    with console.status("starting") as status:
        found = run_bench(config, pick_device(device), batch=batch, steps=steps, say=status.update)
    console.print(table(found))


@app.command(help=COMMANDS["info"])
def info(
    what: Annotated[str, typer.Argument(help="A recipe, a model file, or the folder of a run.")],
    tflops: Annotated[float, typer.Option(help="Sustained speed of the GPU, for the estimate of the time.")] = 100.0,
    set_: SetOption = None,
) -> None:
    require(tflops > 0, f"--tflops {tflops}: must be above 0")

    from rich.console import Console

    from ict.info import describe_model, describe_recipe

    require(
        Path(what).is_file() or Path(what).suffix != ".safetensors",
        f"there is no model at {what}: give a recipe, a model file or the folder of a run",
    )
    if Path(what).is_file() and Path(what).suffix == ".safetensors":
        require(not set_, "--set changes a recipe; a model file stays as it is")
        Console().print(describe_model(Path(what)))
    else:
        Console().print(describe_recipe(load_recipe(find_recipe(what), set_ or []), tflops=tflops))


@app.command(help=COMMANDS["recipes"])
def recipes() -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("recipe", "about", box=None)
    for name, path in list_recipes().items():
        table.add_row(name, Text(load_recipe(path).about))
    Console().print(table)
