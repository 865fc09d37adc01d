"""One step's way through the net and back: the loss and the gradient of a batch, computed anew or played again.

On one GPU the whole way, from pixels to the gradient's norm, is recorded as a CUDA graph by the second step that is the
same but for its numbers, and played again from then on: one launch instead of thousands. What changes from step to step
lies in tensors that are filled before: pixels, labels, the step's number, the objective's phase, the loss's scale.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ict.config import Config
from ict.data import Images, flip_mask
from ict.model import ConsistencyModel
from ict.objectives import Phase, Step, build_objective
from ict.pixels import to_float
from ict.precision import allow_tf32, pick_precision
from ict.ranks import Ranks
from ict.recording import record
from ict.training.guard import Guard
from ict.training.speed import compile_net

Figures = tuple[Tensor, Tensor, dict[str, Any]]  # the batch's mean loss, its gradient's norm, what is worth logging


class Passes:
    """Computes the gradients of one batch after the other. Every rank has its own share of each."""

    def __init__(
        self,
        config: Config,
        model: ConsistencyModel,
        target: ConsistencyModel | None,
        *,
        samples: Tensor,
        guard: Guard,
        ranks: Ranks,
        images: Images,
        warn: Callable[[str], None] = lambda message: None,
    ):
        self.config, self.model, self.target, self.guard, self.ranks, self.warn = (
            config, model, target, guard, ranks, warn,
        )  # fmt: skip
        if config.speed.compile:
            for each in (model, target):
                if each is not None:
                    compile_net(each)
        self.objective, self.student = build_objective(config), ranks.spread(model)
        self.device, self.parameters = model.device, list(model.parameters())
        if hasattr(self.objective, "see"):
            self.objective.see(images.pixels, images.labels, self.device)  # type: ignore
            images.forget()
        self.pieces = samples.to(self.device).chunk(config.training.accumulate)
        self.records = (
            config.speed.graphs and self.device.type == "cuda" and ranks.count == 1 and hasattr(self.objective, "phase")
        )
        self.scale, self.kind = 1.0, ""
        self.kept: Recording | None = None
        self.last: Any = None  # what the last step had that a recording cannot change

    def take(self, pixels: Tensor, labels: Tensor, *, seed: int, number: int, done: int, total: int) -> Figures:
        """Leave the batch's gradient, times `self.scale`, in the model's parameters."""
        step = self.enter_phase(self.step_of(seed=seed, number=number, done=done, total=total))
        self.scale = self.guard.state.scale if self.scaled else 1.0
        if self.records and step.phase is not None:
            inputs = {
                "pixels": pixels, "labels": labels, "number": torch.tensor(number), "scale": torch.tensor(self.scale),
                **step.phase.tensors,
            }  # fmt: skip
            if self.recorded(step, inputs):
                assert self.kept is not None
                loss, gradient, stats = self.kept.play(inputs)
                return loss, gradient, {**stats, **step.phase.figures}
        return self.compute(step, pixels, labels, torch.full((), self.scale, device=self.device))

    def step_of(self, *, seed: int, number: int, done: int, total: int) -> Step:
        """The first piece of a batch."""
        objective = self.config.objective
        return Step(
            seed=seed, number=number, done=done, total=total, target=self.target, samples=self.pieces[0],
            couple_above=objective.couple_above if objective.coupling == "batch" else None,
        )  # fmt: skip

    def recorded(self, step: Step, inputs: dict[str, Tensor]) -> bool:
        """Whether there is a recording that can play this step; makes one at the second step of a kind."""
        kinds = ((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
        fixed = (step.seed, self.model.precision, self.kind, *kinds)
        if fixed != self.last:  # the first of its kind: kernels are chosen and compiled, memory is found
            self.kept, self.last = None, fixed
            return False
        if self.kept is None:
            try:
                self.kept = Recording(self, step, inputs)
            except Exception as error:  # whatever it is: the step itself has been computed before
                self.records = False
                self.warn(f"steps cannot be recorded and will be slower ({type(error).__name__}: {str(error)[:200]})")
        return self.records

    @property
    def scaled(self) -> bool:
        """Whether the loss is multiplied with a scale before its gradient is taken."""
        return self.model.precision == "fp16"

    def enter_phase(self, step: Step) -> Step:
        """The step with its objective's phase, in the precision that belongs to it."""
        phase = self.objective.phase(step) if hasattr(self.objective, "phase") else None  # type: ignore
        self.kind = "" if phase is None else phase.kind
        self.set_precision(None if phase is None else phase.figures.get("levels"))
        return replace(step, phase=phase)

    def set_precision(self, levels: float | None) -> None:
        """What the trunk of student and teacher computes in, at this N."""
        asked = self.config.speed.precision
        if asked == "auto" and self.guard.state.left_half:
            asked = "tf32"
        precision = pick_precision(asked, self.device, levels=None if levels is None else int(levels))
        if precision != self.model.precision and asked == "tf32" and self.guard.state.left_half:
            self.warn("numbers have left the range of fp16: from here on the net computes in tf32, which is slower")
        for model in (self.model, self.target):
            if model is not None:
                model.precision = precision
        if self.device.type == "cuda":
            allow_tf32(precision)

    def compute(self, step: Step, pixels: Tensor, labels: Tensor, scale: Tensor) -> Figures:
        training, count, pieces = self.config.training, self.ranks.count, self.pieces
        for parameter in self.parameters:
            parameter.grad = None
        self.guard.begin()
        total, stats = torch.zeros((), device=self.device), {}
        parts = zip(pieces, pixels.chunk(len(pieces)), labels.chunk(len(pieces)), strict=True)
        for place, (samples, some, classes) in enumerate(parts):
            x, y = load_batch(self.config, some, classes, samples, seed=step.seed, step=step.number)
            last = place == len(pieces) - 1
            with contextlib.nullcontext() if last or count == 1 else self.student.no_sync():  # type: ignore
                loss = self.objective(self.student, x, y, replace(step, samples=samples))  # type: ignore
                share = loss.per_sample.sum() / training.batch
                self.guard.watch(loss, scale=training.batch / count / scale)
                (share * (count * scale)).backward()  # gradients are averaged over the ranks
            total += share.detach()
            stats = loss.stats
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None], foreach=True)
        return total, norm / scale, stats


class Recording:
    """A step as a CUDA graph, with the tensors that it reads and leaves behind."""

    def __init__(self, passes: Passes, step: Step, inputs: dict[str, Tensor]):
        self.inputs = {name: tensor.to(passes.device, copy=True) for name, tensor in inputs.items()}
        self.sources, self.versions = dict(inputs), {name: tensor._version for name, tensor in inputs.items()}
        given = dict(self.inputs)
        pixels, labels, number, scale = (given.pop(name) for name in ("pixels", "labels", "number", "scale"))
        assert step.phase is not None
        step = replace(step, number=number, phase=Phase(given, step.phase.figures))
        for parameter in passes.parameters:
            parameter.grad = None
        self.graph, self.figures = record(lambda: passes.compute(step, pixels, labels, scale))
        self.parameters = passes.parameters
        self.gradients = [parameter.grad for parameter in self.parameters]

    def play(self, inputs: dict[str, Tensor]) -> Figures:
        """The same step with other numbers; those that are still the same tensor are not copied again."""
        for name, tensor in inputs.items():
            if self.sources[name] is not tensor or self.versions[name] != tensor._version:
                self.inputs[name].copy_(tensor, non_blocking=True)
                self.sources[name], self.versions[name] = tensor, tensor._version
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.figures


def load_batch(
    config: Config, pixels: Tensor, labels: Tensor, samples: Tensor, *, seed: int, step: int | Tensor
) -> tuple[Tensor, Tensor | None]:
    """Images as float32 in [-1, 1], mirrored where the draw says so, and their labels where the recipe uses them."""
    x = to_float(pixels)
    if config.data.flip:
        mirrored = flip_mask(samples, seed=seed, step=step)
        x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
    return x, labels if config.data.classes else None
