"""One run from recipe to report: hangs log, samples, checkpoints and the page on the loop's yield."""

import os
import shutil
from dataclasses import dataclass
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

# What a run writes into its folder, and may replace there.
OURS = ("recipe.toml", "log.jsonl", "model.safetensors", "report.html", "checkpoints", "samples")


@dataclass(kw_only=True)
class Run:
    """A run that is ready to go: all its parts are built, its folder is open."""

    config: Config
    folder: Path
    images: Images
    spec: ModelSpec
    state: TrainState
    budget: Budget
    log: RunLog
    console: Console
    saved: int = 0  # step of the newest checkpoint

    @property
    def device(self) -> torch.device:
        return next(self.state.model.parameters()).device

    def save(self) -> None:
        """Write a checkpoint, unless this step has one."""
        if self.saved != self.state.step:
            save_checkpoint(self.folder, self.state, self.spec, self.config, {"log": self.log.state()})
            self.saved = self.state.step

    def generator(self) -> Generator:
        """The first average as it is now."""
        model = build_model(self.spec)
        model.load_state_dict(self.state.averages[0].weights)
        return Generator(model, self.spec).to(self.device)

    def snapshot(self) -> None:
        """Samples from the same noise every time, so that a row of snapshots shows one set of images appear."""
        sheet = grid(self.generator().sample(32, seed=0), columns=8, scale=comfortable_scale(self.spec.image_size))
        write_atomically(self.folder / "samples" / f"step-{self.state.step:08d}.png", png(sheet))

    def warn(self, message: str | None) -> None:
        if message:
            self.console.print(f"[yellow]warning:[/] {message}", highlight=False)


def run(
    config: Config,
    folder: Path,
    *,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> Path:
    """Train a recipe in a folder to the end of its budget; gives the path of the model file."""
    console = console or Console()
    budget = Budget.from_config(config.training)
    images = load_images(config.data)
    spec = ModelSpec.from_config(config, images.class_names)
    place = pick_device(device)
    if place.type == "cuda":
        make_deterministic(config.training.deterministic)
    state = new_state(config, build_model(spec, seed=config.seed).to(place))
    plan = Plan.of(config, budget)
    found = open_folder(folder, config, resume=resume, overwrite=overwrite)
    log = RunLog(folder / "log.jsonl", every=config.training.log_every, batch=config.training.batch)
    if found is not None:
        restore(state, found)
        log.resume(found.manifest["extras"]["log"], state.step)
    this = Run(
        config=config, folder=folder, images=images, spec=spec, state=state, budget=budget, log=log, console=console,
        saved=state.step,
    )  # fmt: skip
    announce(this, plan, found)
    follow(this, plan)

    average = state.averages[0]
    origin = {"run": config.name, "step": state.step, "ema": average.decay}
    write_atomically(folder / "model.safetensors", pack_model(spec, average.weights, origin))
    write_report(folder, images)
    console.print(f"[green]done[/] in {format_time(state.seconds)}", highlight=False)
    for name in ("model.safetensors", "report.html"):
        console.print(f"  {folder / name}", highlight=False, soft_wrap=True)
    return folder / "model.safetensors"


def follow(this: Run, plan: Plan) -> None:
    """Train to the end, and do at each step's yield what is due."""
    training, state, budget = this.config.training, this.state, this.budget
    done, total = budget.progress(state.step, state.seconds)
    first_step, first_done = state.step, done
    try:
        with TrainingDisplay(this.console) as display:
            for _ in train(this.config, state, this.images, budget):
                before, (done, total) = done, budget.progress(state.step, state.seconds)
                display.show(state, done / total, this.log.step(state))
                if before * training.snapshots // total < done * training.snapshots // total:
                    this.snapshot()
                if state.step % training.save_every == 0:
                    this.save()
                if plan.timed and state.step == first_step + 20 and done > first_done:
                    this.warn(plan.warning(steps=round(20 * total / (done - first_done))))
        this.save()
    except KeyboardInterrupt:
        this.save()
        this.console.print(
            f"stopped at step {state.step:,} and saved; go on with: ict train {this.folder} --resume", soft_wrap=True
        )
        raise


def open_folder(folder: Path, config: Config, *, resume: bool, overwrite: bool) -> Found | None:
    """Make a run's folder ready: a new one, an old one emptied, or an old one to go on with."""
    require(not (resume and overwrite), "--resume and --overwrite exclude each other: go on with a run, or replace it")
    held = [folder / name for name in OURS if (folder / name).exists()]
    found = None
    if resume:
        found = find_checkpoint(folder)
        check_same(config, found)
    else:
        require(
            not held or overwrite,
            f"{folder} already holds a run: go on with --resume, replace it with --overwrite, or choose another --out",
        )
        for path in held:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "recipe.toml", to_toml(config).encode())
    return found


# What a resumed run may change: how long it is, what it is called, where its data is, and what it writes on the way.
FREE = {
    "name",
    "about",
    "data.path",
    *(f"training.{key}" for key in (*BOUNDS, "log_every", "save_every", "snapshots", "keep")),
}


def check_same(config: Config, found: Found) -> None:
    """A resumed run is the same run: every key that decides the result must be as it was."""
    old, new = flatten(found.manifest["recipe"]), flatten(to_dict(config))
    changed = [
        f"{key}: {old.get(key)!r} then, {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in FREE
    ]
    require(
        not changed,
        f"the recipe is not the one that {found.path} was trained with; resume with the same, or start a new run with "
        "--out:\n  " + "\n  ".join(changed),
    )


def flatten(values: dict, path: str = "") -> dict[str, object]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat = {}
    for key, value in values.items():
        flat |= flatten(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat


def announce(this: Run, plan: Plan, found: Found | None) -> None:
    """Say what is about to happen, and what may go wrong with it."""
    config = this.config
    parameters = sum(p.numel() for p in this.state.model.parameters())
    conditional = f", {config.data.classes} classes" if config.data.classes else ""
    for line in (
        f"[bold]{config.name}[/]: {len(this.images):,} images of {this.images.describe()}{conditional}; "
        f"{config.net.kind} of {parameters:,} parameters on {this.device}",
        f"noise levels: {plan.describe()}",
        *([f"going on from {found.path}"] if found else []),
    ):
        this.console.print(line, highlight=False, soft_wrap=True)
    for reason in found.passed_over if found else []:
        this.warn(f"passed over {reason}")
    this.warn(plan.warning())


def make_deterministic(on: bool) -> None:
    """Let a GPU use only kernels that give the same bits every time (a CPU always does), or any kernel."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(on, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore  # nothing here reads unwritten memory
    torch.backends.cudnn.benchmark = not on


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
