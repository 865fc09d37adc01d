"""A run that is ready to go, and what it does now and then: save, score, draw, speak."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from ict.config import Config
from ict.data import Images
from ict.evaluation.evaluate import Plan as ScorePlan
from ict.evaluation.evaluate import evaluate
from ict.evaluation.judge import Judge
from ict.evaluation.records import (
    IN_TRAINING,
    Record,
    add_record,
    main_scores,
    other_way,
    read_records,
    same_measure,
    show_number,
)
from ict.files import check_folder, explain, step_name, write_atomically
from ict.model import ConsistencyModel, ModelSpec, build_model, pack_model, read_model, read_spec
from ict.pictures import comfortable_scale, enough, grid, png
from ict.ranks import ALONE, Ranks
from ict.reading import ConfigError, require
from ict.runfolder import identity, teacher_file
from ict.sampling import Generator, load
from ict.training.budget import Budget
from ict.training.guard import Guard
from ict.training.log import RunLog
from ict.training.loop import TrainState
from ict.training.optimiser import gather_optimiser
from ict.training.saver import Saver


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
    guard: Guard
    saver: Saver
    ranks: Ranks = ALONE
    judge: Judge | None = None  # scores the model on the way
    teacher: str = ""  # which model is distilled, if one is
    begun: int = 0  # step of the newest checkpoint that was begun
    returned: int | None = None  # the step that the run last went back to

    def save(self) -> None:
        """Begin a checkpoint, unless this step has one; never of numbers that are out of the ordinary."""
        if self.begun == self.state.step or not self.sound():
            return
        self.begun = self.state.step
        gather_optimiser(self.state.optimiser)
        if self.ranks.main:
            extras = {"log": self.log.state(), "guard": self.guard.state.save(), "identity": self.identity}
            extras |= {"teacher": self.teacher} if self.teacher else {}
            self.saver.save(self.state, extras)

    @functools.cached_property
    def identity(self) -> str:
        """Of the images: a checkpoint says what it was made on."""
        return identity(self.images, classes=self.config.data.classes > 0)

    def sound(self) -> bool:
        """Whether the guard is calm and every weight a number."""
        tensors = [tensor for average in self.state.averages for tensor in average.weights.values()]
        return self.guard.calm and bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())

    def generator(self) -> Generator:
        """The first average as it is now."""
        model = build_model(self.spec)
        model.load_state_dict(self.state.averages[0].weights)
        precision = "auto" if self.guard.state.left_half else self.config.speed.precision
        return Generator(model, self.spec, self.origin()).to(self.state.model.device, precision=precision)

    def origin(self) -> dict[str, Any]:
        """Where the first average comes from."""
        found = {"run": self.config.name, "step": self.state.step, "ema": self.state.averages[0].decay}
        return {**found, "precision": "tf32"} if self.guard.state.left_half else found

    def score(self) -> None:
        """Score the first average, all ranks together; keep it if it is the best so far."""
        assert self.judge is not None
        if not self.sound():
            return
        wanted, path, generator = self.config.evaluation, self.folder / "eval.json", self.generator()
        asked = None if wanted.steps == 1 else wanted.steps  # what was written where nothing was: 18 for diffusion
        plan = ScorePlan(steps=(len(generator.ladder(asked)),), samples=wanted.samples)
        try:
            (record,) = evaluate(generator, self.judge, plan, name=IN_TRAINING, ranks=self.ranks)
        except ConfigError as error:  # samples that are not numbers, say
            if self.ranks.count > 1:  # the others wait for this rank's share
                raise
            self.warn(f"step {self.state.step:,} has no score: {error}. The run goes on")
            return
        record |= {"attempt": self.state.attempt} if self.state.attempt else {}
        if self.ranks.main:
            self.write("the score", lambda: self.keep_score(record, plan, path))

    def keep_score(self, record: Record, plan: ScorePlan, path: Path) -> None:
        assert self.judge is not None
        name, place = self.judge.net.frechet, self.folder / "best.safetensors"
        others = [old for old in read_records(path) if same_measure(old, record)]
        if not others and place.is_file():  # the measure is another than before: what was best is measured again
            others = list(evaluate(load(place, device=self.state.model.device), self.judge, plan, name=IN_TRAINING))
            add_record(path, others[0])
        add_record(path, record)
        best = min((old["scores"][name] for old in others if other_way(old, record)), default=math.inf)
        better = record["scores"][name] < best or not place.is_file()
        if better:
            packed = pack_model(self.spec, self.state.averages[0].weights, self.origin())
            write_atomically(place, packed)
        shown = " · ".join(f"{key} {show_number(key, value)}" for key, value in main_scores(record["scores"]).items())
        self.say(f"step {self.state.step:,}: {shown}{' (the best so far)' if better else ''}")

    def snapshot(self) -> None:
        """Samples from the same noise every time, so that a row of snapshots shows one set of images appear."""
        size = self.spec.image_size
        sheet = grid(self.generator().sample(enough(size, 32), seed=0), columns=8, scale=comfortable_scale(size))
        place = self.folder / "samples" / f"{step_name(self.state.step)}.png"
        self.write("a picture", lambda: write_atomically(place, png(sheet, text=self.state.stats)))

    def write(self, what: str, action: Callable[[], object]) -> bool:
        """Do something that writes; if the disk refuses, warn and go on. Whether it was done."""
        try:
            check_folder(self.folder)
            action()
            return True
        except OSError as error:
            self.warn(f"{what} of step {self.state.step:,} could not be written ({explain(error)}). The run goes on")
            return False

    def say(self, text: str) -> None:
        """Print a line as it is: paths and names may hold brackets."""
        self.console.print(Text(text), soft_wrap=True)

    def warn(self, message: str | None) -> None:
        warn_on(self.console, message)


def warn_on(console: Console, message: str | None) -> None:
    if message:
        console.print(Text.assemble(("warning: ", "yellow"), message), soft_wrap=True)


def fresh_model(config: Config, spec: ModelSpec) -> ConsistencyModel:
    """What a run starts from: fresh weights, or those of another model of the same net (a diffusion model's, say)."""
    model = build_model(spec, seed=config.seed)
    if not config.training.start:
        return model
    path = Path(config.training.start).expanduser()
    other, theirs, _ = read_model(path)
    there, here = nature_of(theirs), nature_of(spec)
    apart = [f"{key} is {there.get(key)} there, {here[key]} here" for key in here if there.get(key) != here[key]]
    require(not apart, f"training.start = {path}: its net is not the recipe's: {'; '.join(apart)}")
    model.net.load_state_dict(other.net.state_dict())
    return model


def nature_of(spec: ModelSpec) -> dict[str, object]:
    """What decides which weights a model has and what it computes with them, by the recipe's keys."""
    idle = {"dropout", "dropout_max_size", "fourier_scale", "positional_scale"} - {f"{spec.net.embedding}_scale"}
    net = {f"net.{key}": value for key, value in vars(spec.net).items() if key not in idle}
    data = {"data.image_size": spec.image_size, "data.channels": spec.channels, "data.classes": len(spec.class_names)}
    return {**net, **data, "noise.sigma_data": spec.noise.sigma_data}


def check_teacher(config: Config, spec: ModelSpec) -> None:
    """That a teacher with classes means the same ones as the recipe's images."""
    path = teacher_file(config)
    theirs = read_spec(path).class_names if path is not None else ()
    require(
        not theirs or theirs == spec.class_names,
        f"objective.teacher_model = {path} knows the classes {', '.join(theirs[:10])}, this run "
        f"{', '.join(spec.class_names[:10]) or 'none'}: they must be the same, or set data.classes to distil another",
    )
