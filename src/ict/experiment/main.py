"""Train a recipe in a folder, from its first step or its last checkpoint to its model and its page."""

import contextlib
import functools
import shlex
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from ict.config import Config
from ict.data import Images, load_images
from ict.device import pick_device
from ict.display import DataProgress, LastingConsole, TrainingDisplay, format_time
from ict.evaluation.evaluate import open_judge
from ict.evaluation.judge import Judge
from ict.evaluation.records import read_records
from ict.evaluation.report import write_report
from ict.experiment.goback import go_back, pick_up, read_attempt
from ict.experiment.parts import Run, check_teacher, fresh_model, warn_on
from ict.files import check_folder, explain, holds_run, list_checkpoints, write_atomically
from ict.model import ConsistencyModel, ModelSpec, pack_model
from ict.objectives.keys import check_names, idle_keys
from ict.ranks import ALONE, Ranks, device_of_rank, join_ranks
from ict.reading import ConfigError, require, to_dict
from ict.runfolder import bound_of, claim, leftovers, open_folder, same_images, teacher_identity
from ict.start import fit
from ict.training.budget import Budget
from ict.training.checkpoint import Found, surroundings
from ict.training.guard import Guard
from ict.training.interrupt import Interrupt, Stopped
from ict.training.log import RunLog, TrainingFailed
from ict.training.loop import TrainState, new_state, train
from ict.training.optimiser import learning_rate
from ict.training.passes import Passes
from ict.training.plan import Plan
from ict.training.saver import Saver
from ict.training.speed import set_up

LONG = 5.0  # seconds of a first step that are worth a word


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

    Under torchrun every rank calls this and computes its share; the main one writes.

    `resume="auto"` goes on with a run that has saved something, and begins one otherwise: for schedulers that start the
    same command again and again.
    """
    require(resume in (True, False, "auto"), f'resume = {resume!r}: use True, False or "auto"')
    require(not (resume and overwrite), "--resume and --overwrite exclude each other: go on with a run, or replace it")
    where = device_of_rank(pick_device(device))
    with join_ranks(where) as ranks, claim(folder) if ranks.main else contextlib.nullcontext():
        console = (console or LastingConsole()) if ranks.main else Console(quiet=True)
        return run_on(ranks, where, config, folder, resume=resume, overwrite=overwrite, console=console)


def run_on(
    ranks: Ranks,
    where: torch.device,
    config: Config,
    folder: Path,
    *,
    resume: bool | str,
    overwrite: bool,
    console: Console,
) -> Path:
    """What each rank of a run does."""
    check_names(config.objective)
    check_shares(config, ranks)
    if resume == "auto":
        resume, overwrite = decide(folder)
    resume, overwrite = ranks.from_main((bool(resume), overwrite))
    budget = Budget.from_config(config.training)
    plan = Plan.of(config, budget)
    if not resume and ranks.main:
        leftovers(folder, overwrite=overwrite)  # refused now, not after minutes of decoding
    with DataProgress() as progress:
        images = load_images(config.data, progress)
    spec = ModelSpec.from_config(config, images.class_names)
    judge = judge_of(config, images, where)
    if resume and ranks.main:
        read_records(folder / "eval.json")  # damaged: said now, not after hours
    check_teacher(config, spec)
    teacher = teacher_identity(config) if ranks.main else ""  # now: its file may be gone by the first checkpoint
    state = first_state(config, spec, images, ranks, where, resume=resume)
    compiles = where.type == "cuda" or config.speed.compile
    with console.status(f"the first step{', and compiling what is new here' if compiles else ''}"):
        seconds = rehearse(config, state, images, ranks)
    ranks.wait()

    # From here on the recipe is known to run, and the folder may be touched.
    found = open_folder(folder, config, images, resume=resume, overwrite=overwrite) if ranks.main else None
    found = ranks.from_main(found)
    guard = Guard(config, ranks, where)
    warn = functools.partial(warn_on, console)
    log = RunLog(
        folder / "log.jsonl" if ranks.main else None,
        every=config.training.log_every,
        batch=config.training.batch,
        warn=warn,
    )
    if found is not None:
        pick_up(found, state, log, guard, ranks)
        state.attempt = ranks.from_main(max(state.attempt, read_attempt(folder)))
    this = Run(
        config=config, folder=folder, images=images, spec=spec, state=state, budget=budget, log=log, guard=guard,
        saver=Saver(folder, spec, config, warn, step=state.step), console=console, ranks=ranks, judge=judge,
        begun=state.step, teacher=teacher,
    )  # fmt: skip
    announce(this, plan, found)
    if seconds > LONG and compiles:
        this.say(f"the first step took {format_time(seconds)}: what was compiled for it is kept for the next start")
    follow(this, plan)
    if ranks.main:
        finish(this)
    ranks.wait()
    return folder / "model.safetensors"


def first_state(
    config: Config, spec: ModelSpec, images: Images, ranks: Ranks, where: torch.device, *, resume: bool
) -> TrainState:
    """What a run begins with; one that goes on has weights and a start already, which will be put there."""
    begin = replace(config, training=replace(config.training, start="")) if resume else config
    model = fresh_model(begin, spec)
    set_up(config, model, where)
    if not resume:
        fit_start(config, model, images, ranks)
    return new_state(config, model, ranks=ranks)


def fit_start(config: Config, model: ConsistencyModel, images: Images, ranks: Ranks) -> None:
    """Fit where samples begin, if the recipe has a Gaussian for it: on the main rank, for all."""
    if model.start is None:
        return
    if ranks.main:
        labels = images.labels if config.data.classes else None
        with DataProgress("where samples begin") as progress:
            fit(model.start, images.pixels, labels, flip=config.data.flip, progress=progress)
    ranks.copy_main(model.start.buffers())


def check_shares(config: Config, ranks: Ranks) -> None:
    """That a batch can be cut into equal pieces for all ranks."""
    training = config.training
    pieces = ranks.count * training.accumulate
    require(
        training.batch % pieces == 0,
        f"training.batch = {training.batch} cannot be shared among {ranks.count} ranks in "
        f"{training.accumulate} pieces each: use a multiple of {pieces}",
    )
    require(
        config.objective.coupling != "batch" or training.batch >= 2 * pieces,
        f"objective.coupling = batch needs pieces of at least 2 images: {training.batch} images on {ranks.count} ranks "
        f"in {training.accumulate} pieces each are too few",
    )


def decide(folder: Path) -> tuple[bool, bool]:
    """What `auto` means for a folder: whether to go on with a run, and whether to replace one."""
    resume = bool(list_checkpoints(folder))
    overwrite = not resume and holds_run(folder)  # it has nothing to go on with
    finished = [name for name in ("model.safetensors", "best.safetensors") if (folder / name).exists()]
    require(
        not (overwrite and finished),
        f"{folder} holds {' and '.join(finished)} but no checkpoint to go on from: choose another --out, or "
        "replace it with --overwrite",
    )
    return resume, overwrite


def judge_of(config: Config, images: Images, where: torch.device) -> Judge | None:
    """Who scores on the way, if the recipe wants that: all that it needs is looked for before the run begins."""
    scoring = config.evaluation
    if not scoring.times:
        return None
    weights = Path(scoring.weights).expanduser() if scoring.weights else None
    return open_judge(
        config.data, images=images, features=scoring.features, weights=weights, device=where, samples=scoring.samples
    )


def finish(this: Run) -> None:
    """Write the model and the page; where the run's folder does not take the model, it is put somewhere else."""
    folder, state, images = this.folder, this.state, this.images
    packed = pack_model(this.spec, state.averages[0].weights, this.origin())
    try:
        check_folder(folder)
        write_atomically(folder / "model.safetensors", packed)
    except OSError as error:
        rescued = Path(tempfile.mkdtemp(prefix=f"ict-{this.config.name}-")) / "model.safetensors"
        write_atomically(rescued, packed)
        raise TrainingFailed(f"the run is done, but {explain(error)}. Its model was put into {rescued}") from error
    this.write("the page", lambda: write_report(folder, images, device=state.model.device))
    this.say(f"done in {format_time(state.seconds)}")
    for name in ("model.safetensors", "report.html"):
        this.say(f"  {folder / name}")


def follow(this: Run, plan: Plan) -> None:
    """Train to the end, and do at each step's yield what is due."""
    state = this.state
    with TrainingDisplay(this.console) as display, Interrupt(this.say) as interrupt, contextlib.ExitStack() as last:
        last.callback(this.saver.wait)  # what is being written is finished, whatever happens
        while True:
            take_steps(this, plan, display, interrupt)
            if this.sound():
                break
            this.guard.alarm = "it ended with numbers out of the ordinary"
            go_back(this)
            if state.step == 0 and this.budget.finished(state.step, state.seconds):
                raise TrainingFailed("the run diverged, had saved nothing, and its time is over: lower training.lr")
        this.log.finish(state)
        this.save()


def take_steps(this: Run, plan: Plan, display: TrainingDisplay, interrupt: Interrupt) -> None:
    training, state, budget = this.config.training, this.state, this.budget
    done, total = budget.progress(state.step, state.seconds)
    first_step, first_done = state.step, done
    scores, due = this.config.evaluation.times, False
    steps = train(
        this.config, state, this.images, budget, ranks=this.ranks, guard=this.guard,
        asked=lambda: interrupt.asked or 0, warn=this.warn,
    )  # fmt: skip
    for _ in steps:
        if this.guard.alarm is not None:
            go_back(this)
            due, (done, total) = False, budget.progress(state.step, state.seconds)
            continue
        before, (done, total) = done, budget.progress(state.step, state.seconds)
        display.show(state, done / total, this.log.step(state))
        if this.ranks.main and before * training.snapshots // total < done * training.snapshots // total:
            this.snapshot()
        if before * scores // total < done * scores // total:
            this.score()
        due = due or state.step % training.save_every == 0
        if due and this.guard.calm:  # or else as soon as it is
            this.save()
            due = False
        if this.saver.failed:
            this.saver.wait()  # says so
        if plan.timed and state.step == first_step + 20 and done > first_done:
            this.warn(plan.warning(steps=round(20 * total / (done - first_done))))
        if this.ranks.count == 1:
            state.asked = interrupt.asked or 0  # also what has come since the step ended
        if (
            state.asked and not this.guard.state.in_a_row
        ):  # only here is a step whole: weights, averages, counters, log and pictures agree
            stop(this)


def stop(this: Run) -> None:
    """Save and leave, all ranks together: one that left early would have the others stopped."""
    this.save()
    saved = this.saver.wait() and this.begun == this.state.step
    this.ranks.wait()
    how = "and saved" if saved else f"without saving (the last checkpoint is of step {this.saver.saved:,})"
    folder = shlex.quote(str(this.folder))
    this.say(f"stopped at step {this.state.step:,} {how}; go on with: ict train {folder} --resume")
    raise Stopped(this.state.asked)


def rehearse(config: Config, state: TrainState, images: Images, ranks: Ranks) -> float:
    """One image through a whole step and back (on a GPU as many as will be: memory may run out), before any writing.

    Gives the seconds that it took.
    """
    begun, device = time.perf_counter(), state.model.device
    count = config.training.batch // config.training.accumulate // ranks.count if device.type == "cuda" else 1
    sample = torch.zeros(count, dtype=torch.int64, device=device)
    one = Images(pixels=images.pixels[:1], labels=images.labels[:1], class_names=images.class_names).to(device)
    single = replace(config, training=replace(config.training, accumulate=1))
    try:
        learning_rate(config.training, 0.0)
        state.model.train()
        passes = Passes(
            single, state.model, state.target, samples=sample, guard=Guard(config, ALONE, device), ranks=ALONE,
            images=images,
        )  # fmt: skip
        pixels, labels = one.pixels[sample], one.labels[sample]
        moments = [0, 999] if config.objective.denoise else [999]  # a warm-up, and what the run ends with
        for done in moments:
            loss, _, _ = passes.take(pixels, labels, seed=config.seed, number=0, done=done, total=1000)
            require(bool(loss.isfinite()), f"this recipe cannot be trained: its first loss is {loss.item()}")
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except (ValueError, OverflowError, ZeroDivisionError, RuntimeError) as error:
        if "determinis" in str(error):
            raise ConfigError(f"{error}\nSet training.deterministic = false to train without bitwise resume") from error
        raise ConfigError(f"this recipe cannot be trained: {error}") from error
    state.optimiser.zero_grad(set_to_none=True)
    return time.perf_counter() - begun


def announce(this: Run, plan: Plan, found: Found | None) -> None:
    """Say what is about to happen, and what may go wrong with it."""
    config = this.config
    conditional = f", {config.data.classes} classes" if config.data.classes else ""
    this.say(
        f"{config.name}: {len(this.images):,} images of {this.images.describe()}{conditional}; "
        f"{config.net.kind} of {this.state.model.size:,} parameters on {this.state.model.device}"
    )
    this.warn(this.images.note)
    if len(this.images) < config.training.batch:
        this.warn(f"a step takes {config.training.batch:,} images, more than there are: lower training.batch")
    this.say(f"noise levels: {plan.describe()}")
    this.warn(plan.warning())
    if idle := idle_keys(config):
        this.say(f"objective.kind = {config.objective.kind} makes no use of objective.{', objective.'.join(idle)}")
    objective, middle = config.objective, config.sampling.sigma_mid
    if objective.coupling == "batch" and middle > objective.couple_above and objective.learns != "diffusion":
        this.warn(
            f"sampling in several steps adds independent noise at σ = {middle:g}, but this model learns coupled noise "
            f"above {objective.couple_above:g}: use it in one step, or raise objective.couple_above"
        )
    if found is None:
        return
    for reason in found.passed_over:
        this.warn(f"passed over {reason}")
    this.say(f"going on from {found.path}")
    was = bound_of(found.manifest["recipe"]["training"])
    if was != (now := bound_of(to_dict(config.training))):
        this.warn(f"the run had {was} and has {now} now: N and learning rate are those of a run of that length")
    done, _ = this.budget.progress(this.state.step, this.state.seconds)
    if done < plan.first and this.guard.state.counted and this.guard.state.kind == "":
        this.warn(f"the run is longer than it was and denoises again until {plan.when(plan.first)}")
    if same_images(found, this.images, config) is False:
        this.warn("the images are not those that the run has learned from so far")
    then, here = found.manifest["made_with"], surroundings(this.state)
    changed = ", ".join(f"{key} {then.get(key)} then and {here[key]} now" for key in here if then.get(key) != here[key])
    this.warn(changed and f"the run will not be equal to the bit to an unbroken one: {changed}")
