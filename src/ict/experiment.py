"""One run from recipe to report: hangs log, samples, checkpoints and the page on the loop's yield."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from ict.config import Config, ConfigError, require
from ict.data import Images, load_images
from ict.device import make_deterministic, pick_device, place
from ict.display import DataProgress, LastingConsole, TrainingDisplay, format_time
from ict.evaluation.evaluate import Plan as ScorePlan
from ict.evaluation.evaluate import evaluate, open_judge
from ict.evaluation.judge import Judge
from ict.evaluation.records import IN_TRAINING, add_record, main_scores, read_records, same_measure, show_number
from ict.evaluation.report import write_report
from ict.files import holds_run, list_checkpoints, step_name, write_atomically
from ict.model import ModelSpec, build_model, pack_model
from ict.objectives import Step, build_objective
from ict.pictures import comfortable_scale, grid, png
from ict.runfolder import leftovers, open_folder
from ict.sampling import Generator, load
from ict.training.budget import Budget
from ict.training.checkpoint import Found, restore, save_checkpoint, surroundings
from ict.training.interrupt import Interrupt, Stopped
from ict.training.log import RunLog, check_finite
from ict.training.loop import TrainState, load_batch, new_state, train
from ict.training.optimiser import learning_rate
from ict.training.plan import Plan


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
    judge: Judge | None = None  # scores the model on the way
    saved: int = 0  # step of the newest checkpoint

    def save(self) -> None:
        """Write a checkpoint, unless this step has one; never of a run that has diverged."""
        if self.saved != self.state.step:
            check_finite(self.state, self.state.loss.item(), self.state.gradient.item())
            save_checkpoint(self.folder, self.state, self.spec, self.config, {"log": self.log.state()})
            self.saved = self.state.step

    def generator(self) -> Generator:
        """The first average as it is now."""
        model = build_model(self.spec)
        model.load_state_dict(self.state.averages[0].weights)
        return Generator(model, self.spec, self.origin()).to(self.state.model.device)

    def origin(self) -> dict[str, Any]:
        """Where the first average comes from."""
        return {"run": self.config.name, "step": self.state.step, "ema": self.state.averages[0].decay}

    def score(self) -> None:
        """Score the first average; keep it if it is the best so far."""
        assert self.judge is not None
        wanted, path = self.config.evaluation, self.folder / "eval.json"
        check_finite(self.state, self.state.loss.item(), self.state.gradient.item())
        plan = ScorePlan(steps=(wanted.steps,), samples=wanted.samples)
        (record,) = evaluate(self.generator(), self.judge, plan, name=IN_TRAINING)
        name, place = self.judge.net.frechet, self.folder / "best.safetensors"
        others = [old for old in read_records(path) if same_measure(old, record)]
        if not others and place.is_file():  # the measure is another than before: what was best is measured again
            others = list(evaluate(load(place, device=self.state.model.device), self.judge, plan, name=IN_TRAINING))
            add_record(path, others[0])
        add_record(path, record)
        best = min((old["scores"][name] for old in others if old["step"] != self.state.step), default=math.inf)
        better = record["scores"][name] < best or not place.is_file()
        if better:
            packed = pack_model(self.spec, self.state.averages[0].weights, self.origin())
            write_atomically(place, packed)
        shown = " · ".join(f"{key} {show_number(key, value)}" for key, value in main_scores(record["scores"]).items())
        self.say(f"step {self.state.step:,}: {shown}{' (the best so far)' if better else ''}")

    def snapshot(self) -> None:
        """Samples from the same noise every time, so that a row of snapshots shows one set of images appear."""
        sheet = grid(self.generator().sample(32, seed=0), columns=8, scale=comfortable_scale(self.spec.image_size))
        write_atomically(self.folder / "samples" / f"{step_name(self.state.step)}.png", png(sheet))

    def say(self, text: str) -> None:
        """Print a line as it is: paths and names may hold brackets."""
        self.console.print(Text(text), soft_wrap=True)

    def warn(self, message: str | None) -> None:
        if message:
            self.console.print(Text.assemble(("warning: ", "yellow"), message), soft_wrap=True)


def run(
    config: Config,
    folder: Path,
    *,
    device: str = "auto",
    resume: bool | str = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> Path:
    """Train a recipe in a folder to the end of its budget; gives the path of the model file.

    `resume="auto"` goes on with a run that has saved something, and begins one otherwise: for schedulers that start the
    same command again and again.
    """
    require(resume in (True, False, "auto"), f'resume = {resume!r}: use True, False or "auto"')
    require(not (resume and overwrite), "--resume and --overwrite exclude each other: go on with a run, or replace it")
    if resume == "auto":
        resume = bool(list_checkpoints(folder))
        overwrite = not resume and holds_run(folder)  # it has nothing to go on with
    resume = bool(resume)
    budget = Budget.from_config(config.training)
    plan = Plan.of(config, budget)
    if not resume:
        leftovers(folder, overwrite=overwrite)  # refused now, not after minutes of decoding
    with DataProgress() as progress:
        images = load_images(config.data, progress)
    spec = ModelSpec.from_config(config, images.class_names)
    where = pick_device(device)
    scoring = config.evaluation
    judge = None
    if scoring.times:  # everything that scores need is looked for before the run begins
        weights = Path(scoring.weights).expanduser() if scoring.weights else None
        judge = open_judge(
            config.data, images=images, features=scoring.features, weights=weights, device=where,
            samples=scoring.samples,
        )  # fmt: skip
    if resume:
        read_records(folder / "eval.json")  # damaged: said now, not after hours
    if where.type == "cuda":
        make_deterministic(config.training.deterministic)
    model = build_model(spec, seed=config.seed)
    place(model, where)
    state = new_state(config, model)
    rehearse(config, state, images)

    # From here on the recipe is known to run, and the folder may be touched.
    found = open_folder(folder, config, resume=resume, overwrite=overwrite)
    log = RunLog(folder / "log.jsonl", every=config.training.log_every, batch=config.training.batch)
    if found is not None:
        restore(state, found)
        log.resume(found.manifest["extras"]["log"], state.step)
    this = Run(
        config=config, folder=folder, images=images, spec=spec, state=state, budget=budget, log=log,
        console=console or LastingConsole(), saved=state.step, judge=judge,
    )  # fmt: skip
    announce(this, plan, found)
    follow(this, plan)

    write_atomically(folder / "model.safetensors", pack_model(spec, state.averages[0].weights, this.origin()))
    write_report(folder, images)
    this.say(f"done in {format_time(state.seconds)}")
    for name in ("model.safetensors", "report.html"):
        this.say(f"  {folder / name}")
    return folder / "model.safetensors"


def follow(this: Run, plan: Plan) -> None:
    """Train to the end, and do at each step's yield what is due."""
    training, state, budget = this.config.training, this.state, this.budget
    done, total = budget.progress(state.step, state.seconds)
    first_step, first_done = state.step, done
    scores = this.config.evaluation.times
    with TrainingDisplay(this.console) as display, Interrupt(this.say) as interrupt:
        for _ in train(this.config, state, this.images, budget):
            before, (done, total) = done, budget.progress(state.step, state.seconds)
            display.show(state, done / total, this.log.step(state))
            if before * training.snapshots // total < done * training.snapshots // total:
                this.snapshot()
            if before * scores // total < done * scores // total:
                this.score()
            if state.step % training.save_every == 0:
                this.save()
            if plan.timed and state.step == first_step + 20 and done > first_done:
                this.warn(plan.warning(steps=round(20 * total / (done - first_done))))
            if (
                interrupt.asked is not None
            ):  # only here is a step whole: weights, averages, counters, log and pictures agree
                this.save()
                this.say(f"stopped at step {state.step:,} and saved; go on with: ict train {this.folder} --resume")
                raise Stopped(interrupt.asked)
    this.log.finish(state)
    this.save()


def rehearse(config: Config, state: TrainState, images: Images) -> None:
    """One image through a whole step and back (on a GPU as many as will be: memory may run out), before any writing."""
    device = state.model.device
    count = config.training.batch // config.training.accumulate if device.type == "cuda" else 1
    sample = torch.zeros(count, dtype=torch.int64, device=device)
    one = Images(pixels=images.pixels[:1], labels=images.labels[:1], class_names=images.class_names).to(device)
    try:
        learning_rate(config.training, 0.0)
        x, labels = load_batch(config, one.pixels[sample], one.labels[sample], sample, 0)
        step = Step(seed=config.seed, number=0, done=0, total=1, samples=sample)
        loss = build_objective(config)(state.model.train(), x, labels, step).per_sample.sum()
        loss.backward()
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except (ValueError, OverflowError, ZeroDivisionError, RuntimeError) as error:
        if "determinis" in str(error):
            raise ConfigError(f"{error}\nSet training.deterministic = false to train without bitwise resume") from error
        raise ConfigError(f"this recipe cannot be trained: {error}") from error
    require(bool(loss.isfinite()), f"this recipe cannot be trained: its first loss is {loss.item()}")
    state.optimiser.zero_grad(set_to_none=True)


def announce(this: Run, plan: Plan, found: Found | None) -> None:
    """Say what is about to happen, and what may go wrong with it."""
    config = this.config
    conditional = f", {config.data.classes} classes" if config.data.classes else ""
    this.say(
        f"{config.name}: {len(this.images):,} images of {this.images.describe()}{conditional}; "
        f"{config.net.kind} of {this.state.model.size:,} parameters on {this.state.model.device}"
    )
    this.say(f"noise levels: {plan.describe()}")
    this.warn(plan.warning())
    if found is None:
        return
    for reason in found.passed_over:
        this.warn(f"passed over {reason}")
    this.say(f"going on from {found.path}")
    then, now = found.manifest["made_with"], surroundings(this.state)
    changed = ", ".join(f"{key} {then.get(key)} then and {now[key]} now" for key in now if then.get(key) != now[key])
    this.warn(changed and f"the run will not be equal to the bit to an unbroken one: {changed}")
