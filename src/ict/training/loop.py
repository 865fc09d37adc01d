"""The training loop: a generator that yields its state once a step. Everything else hangs on that yield."""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ict.config import Config
from ict.curriculum import teacher_ema_2023
from ict.data import Images, batch_indices
from ict.data.feed import Order, open_feed
from ict.model import ConsistencyModel
from ict.ranks import ALONE, Ranks
from ict.training.budget import Budget
from ict.training.ema import WeightAverage
from ict.training.guard import Guard
from ict.training.optimiser import build_optimiser, learning_rate, own_state
from ict.training.passes import Passes
from ict.training.update import Update


@dataclass(kw_only=True)
class TrainState:
    """All that a run is at one moment. The first block is what a checkpoint keeps."""

    model: ConsistencyModel
    averages: list[WeightAverage]
    optimiser: torch.optim.Optimizer
    target: ConsistencyModel | None = None  # the average that teaches, for recipes that have one
    step: int = 0  # steps done
    seconds: float = 0.0  # wall-clock time spent, over all restarts
    attempt: int = 0  # how often the run has gone back to a checkpoint: each time it draws anew from there

    loss: Tensor = field(default_factory=lambda: torch.tensor(float("nan")))  # mean over the batch of the last step
    gradient: Tensor = field(default_factory=lambda: torch.tensor(float("nan")))  # its gradient's norm
    stats: dict[str, float] = field(default_factory=dict)
    figures: Callable[[], dict[str, Any]] = dict  # what the guard has to say, when it is asked
    lr: float = 0.0
    waited: float = 0.0  # seconds that this process has waited for data
    taken: bool = True  # whether the optimiser took the last step, which it does not if it is not finite
    asked: int = 0  # the signal that asks the run to stop, on whichever rank it came
    done: int = 0  # progress is done / total
    total: int = 1


def new_state(config: Config, model: ConsistencyModel, *, ranks: Ranks = ALONE) -> TrainState:
    training = config.training
    averages = [WeightAverage(model, decay=decay, ramp=training.ema_ramp) for decay in training.ema]
    target = copy.deepcopy(model).requires_grad_(False) if config.objective.teacher == "ema" else None
    optimiser = build_optimiser(model, training, ranks=ranks)
    return TrainState(model=model, averages=averages, optimiser=optimiser, target=target)


def reset(state: TrainState, model: ConsistencyModel) -> None:
    """Begin a run anew from fresh weights."""
    state.model.load_state_dict(model.state_dict())
    for average in state.averages:
        average.load(model.state_dict())
    if state.target is not None:
        state.target.load_state_dict(model.state_dict())
    state.optimiser.state.clear()
    own_state(state.optimiser).clear()
    state.step = 0


def draw_seed(config: Config, attempt: int) -> int:
    """The seed of data order, noise and dropout: the recipe's, and another each time that a run has gone back."""
    return (config.seed + attempt * 0x9E3779B97F4A7C15) % 2**63


def train(
    config: Config,
    state: TrainState,
    images: Images,
    budget: Budget,
    *,
    ranks: Ranks = ALONE,
    guard: Guard | None = None,
    asked: Callable[[], int] = lambda: 0,
    warn: Callable[[str], None] = lambda message: None,
) -> Iterator[TrainState]:
    """Take steps until the budget is spent; yields the one `state`, changed in place, after each.

    Every rank computes its share of the same batch. `asked` tells of a signal that this rank has received.
    """
    training, model, optimiser = config.training, state.model, state.optimiser
    device = model.device
    guard = guard or Guard(config, ranks, device)
    mine = ranks.share(torch.arange(training.batch))
    passes = Passes(config, model, state.target, samples=mine, guard=guard, ranks=ranks, images=images, warn=warn)
    update = Update(config, model, optimiser, state.averages, state.target, ranks=ranks)

    def order_of(seed: int) -> Order:
        return lambda step: batch_indices(step, batch=training.batch, count=len(images), seed=seed)[mine]

    seed = draw_seed(config, state.attempt)
    feed = open_feed(images, order_of(seed), device, kind=config.data.feed)
    started = time.monotonic() - state.seconds
    model.train()
    if state.target is not None:
        state.target.train()

    try:
        while not budget.finished(state.step, state.seconds):
            state.done, state.total = budget.progress(state.step, state.seconds)
            state.lr = learning_rate(training, state.done / state.total)
            for group in optimiser.param_groups:
                group["lr"] = state.lr

            if seed != draw_seed(config, state.attempt):  # the run has gone back, and goes another way from there
                seed = draw_seed(config, state.attempt)
                feed.reorder(order_of(seed))
            pixels, labels = feed.take(state.step)
            state.waited = feed.waited
            state.loss, state.gradient, state.stats = passes.take(
                pixels, labels, seed=seed, number=state.step, done=state.done, total=state.total
            )
            good, levels = guard.ask(state.loss, state.gradient), float(state.stats.get("levels", 0))
            decay = None
            if state.target is not None:
                decay = teacher_ema_2023(int(levels), s0=config.objective.s0, mu0=config.objective.mu0)
            update.prepare(scale=passes.scale)
            update.launch(good, number=state.step, target_decay=decay)
            state.taken = guard.check(step=state.step, levels=levels, scaled=passes.scaled, kind=passes.kind)
            update.settle(taken=state.taken)
            state.figures = guard.figures

            state.step += 1
            state.seconds, signal = ranks.highest([time.monotonic() - started, float(asked())])
            state.asked = int(signal)
            yield state
    finally:
        feed.close()
