"""One run from recipe to report: hangs log, samples, checkpoints and the page on the loop's yield."""

import shutil
from pathlib import Path

import torch
from rich.console import Console

from ict.config import BOUNDS, Config, ConfigError, require, to_dict, to_toml
from ict.data import Images, load_images
from ict.display import TrainingDisplay, format_time
from ict.evaluation.report import write_report
from ict.files import write_atomically
from ict.model import ModelSpec, build_model, pack_model
from ict.pictures import comfortable_scale, grid, png
from ict.sampling import Generator
from ict.training.budget import Budget
from ict.training.checkpoint import Found, find_checkpoint, restore, save_checkpoint
from ict.training.log import RunLog
from ict.training.loop import TrainState, new_state, train
from ict.training.plan import Plan

OURS = ("recipe.toml", "log.jsonl", "model.safetensors", "report.html", "checkpoints", "samples")


def run(
    config: Config,
    folder: Path,
    *,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> Path:
    """Train a recipe in a folder, to the end of its budget; gives the path of the model file."""
    console = console or Console()
    budget = Budget.from_config(config.training)
    plan = Plan.of(config, budget)
    images = load_images(config.data)
    spec = ModelSpec.from_config(config, images.class_names)
    model = build_model(spec, seed=config.seed).to(pick_device(device))
    found = open_folder(folder, config, resume=resume, overwrite=overwrite)
    state = new_state(config, model)
    log = RunLog(folder / "log.jsonl", every=config.training.log_every, batch=config.training.batch)
    if found is not None:
        restore(state, found)
        log.resume(found.manifest["extras"]["log"], state.step)
    announce(console, config, plan, state, images, found)
    follow(config, folder, state, images, budget, log=log, plan=plan, spec=spec, console=console)

    write_atomically(folder / "model.safetensors", pack_average(config, state, spec))
    write_report(folder, images)
    console.print(
        f"[green]done[/] in {format_time(state.seconds)}: {folder / 'model.safetensors'}, {folder / 'report.html'}"
    )
    return folder / "model.safetensors"


def follow(
    config: Config,
    folder: Path,
    state: TrainState,
    images: Images,
    budget: Budget,
    *,
    log: RunLog,
    plan: Plan,
    spec: ModelSpec,
    console: Console,
) -> None:
    """Train to the end, and do at each step's yield what is due."""
    training = config.training
    saved = state.step

    def save() -> None:
        nonlocal saved
        if saved != state.step:
            save_checkpoint(folder, state, spec, config, {"log": log.state()})
            saved = state.step

    done, total = budget.progress(state.step, state.seconds)
    first_step, first_done = state.step, done
    try:
        with TrainingDisplay(console) as display:
            for _ in train(config, state, images, budget):
                before, (done, total) = done, budget.progress(state.step, state.seconds)
                display.show(state, done / total, log.step(state))
                if before * training.snapshots // total < done * training.snapshots // total:
                    write_snapshot(folder, state, spec)
                if state.step % training.save_every == 0:
                    save()
                if plan.timed and state.step == first_step + 20 and done > first_done:
                    warn(console, plan.warning(steps=round(20 * total / (done - first_done))))
            save()
    except KeyboardInterrupt:
        save()
        console.print(f"\nstopped at step {state.step:,} and saved; go on with: ict train {folder} --resume")
        raise


def open_folder(folder: Path, config: Config, *, resume: bool, overwrite: bool) -> Found | None:
    """Make a run's folder ready: a new one, an old one emptied, or an old one to go on with."""
    require(
        not (resume and overwrite), "--resume and --overwrite exclude each other: go on with the run, or start anew"
    )
    held = [name for name in OURS if (folder / name).exists()]
    if resume:
        found = find_checkpoint(folder)
        check_same(config, found)
    else:
        found = None
        require(
            not held or overwrite,
            f"{folder} already holds a run: go on with --resume, replace it with --overwrite, or choose another --out",
        )
        for name in held:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "recipe.toml", to_toml(config).encode())
    return found


# What a resumed run may change: how long it is, and what it writes on the way.
FREE = {*BOUNDS, "log_every", "save_every", "snapshots", "keep"}


def check_same(config: Config, found: Found) -> None:
    """A resumed run is the same run: every key that decides the result must be as it was."""
    old, new = found.manifest["recipe"], to_dict(config)
    changed = [
        f"{section}.{key}: {was.get(key)!r} then, {now.get(key)!r} now"
        for section in sorted(new.keys() | old.keys())
        if isinstance(new.get(section), dict)
        for was, now in [(old.get(section, {}), new[section])]
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key) and not (section == "training" and key in FREE)
    ]
    if old.get("seed") != new["seed"]:
        changed.append(f"seed: {old.get('seed')!r} then, {new['seed']!r} now")
    require(
        not changed,
        f"the recipe is not the one that {found.path} was trained with; resume with the same, or start a new run with "
        "--out:\n  " + "\n  ".join(changed),
    )


def announce(
    console: Console, config: Config, plan: Plan, state: TrainState, images: Images, found: Found | None
) -> None:
    """Say what is about to happen, and what may go wrong with it."""
    parameters = sum(p.numel() for p in state.model.parameters())
    device = next(state.model.parameters()).device
    conditional = f", {len(images.class_names)} classes" if config.data.classes else ""
    console.print(
        f"[bold]{config.name}[/]: {len(images):,} images of {images.describe()}{conditional}; "
        f"{config.net.kind} of {parameters:,} parameters on {device}",
        highlight=False,
    )
    console.print(f"noise levels: {plan.describe()}", highlight=False)
    for reason in found.passed_over if found else []:
        warn(console, f"passed over {reason}")
    if found is not None:
        console.print(f"going on from {found.path}", highlight=False)
    warn(console, plan.warning())


def warn(console: Console, message: str | None) -> None:
    if message:
        console.print(f"[yellow]warning:[/] {message}", highlight=False)


def average_weights(state: TrainState, spec: ModelSpec) -> Generator:
    """The first average of a run as a generator."""
    model = build_model(spec)
    model.load_state_dict(state.averages[0].weights)
    return Generator(model, spec).to(next(state.model.parameters()).device)


def pack_average(config: Config, state: TrainState, spec: ModelSpec) -> bytes:
    average = state.averages[0]
    return pack_model(spec, average.weights, {"run": config.name, "step": state.step, "ema": average.decay})


def write_snapshot(folder: Path, state: TrainState, spec: ModelSpec) -> None:
    """Samples from the same noise every time, so that a row of snapshots shows one set of images appear."""
    images = average_weights(state, spec).sample(32, seed=0)
    picture = grid(images, columns=8, scale=comfortable_scale(spec.image_size))
    write_atomically(folder / "samples" / f"step-{state.step:08d}.png", png(picture))


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name} cannot be used here ({str(error).splitlines()[0]}): try cpu") from error
    return device
