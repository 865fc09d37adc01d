"""The training loop: a generator that yields its state once a step. Everything else hangs on that yield."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ict.config import Config
from ict.data import Images, batch_indices, flip_mask, to_float
from ict.data.feed import open_feed
from ict.model import ConsistencyModel
from ict.objectives import Step, build_objective
from ict.training.budget import Budget
from ict.training.ema import WeightAverage
from ict.training.optimiser import build_optimiser, learning_rate


@dataclass(kw_only=True)
class TrainState:
    """All that a run is at one moment. The first block is what a checkpoint keeps."""

    model: ConsistencyModel
    averages: list[WeightAverage]
    optimiser: torch.optim.Optimizer
    step: int = 0  # optimiser steps done
    seconds: float = 0.0  # wall-clock time spent, over all restarts

    loss: Tensor = field(default_factory=lambda: torch.tensor(float("nan")))  # mean over the batch of the last step
    gradient: Tensor = field(default_factory=lambda: torch.tensor(float("nan")))  # its gradient's norm
    stats: dict[str, float] = field(default_factory=dict)
    lr: float = 0.0
    waited: float = 0.0  # seconds that this process has waited for data
    done: int = 0  # progress is done / total
    total: int = 1


def new_state(config: Config, model: ConsistencyModel) -> TrainState:
    training = config.training
    averages = [WeightAverage(model, decay=decay, ramp=training.ema_ramp) for decay in training.ema]
    return TrainState(model=model, averages=averages, optimiser=build_optimiser(model, training))


def train(config: Config, state: TrainState, images: Images, budget: Budget) -> Iterator[TrainState]:
    """Take steps until the budget is spent; yields the one `state`, changed in place, after each."""
    training, model, optimiser = config.training, state.model, state.optimiser
    objective = build_objective(config)
    device = model.device
    feed = open_feed(
        images,
        lambda step: batch_indices(step, batch=training.batch, count=len(images), seed=config.seed),
        device,
        kind=config.data.feed,
    )
    samples = torch.arange(training.batch, device=device)
    started = time.monotonic() - state.seconds
    model.train()

    try:
        while not budget.finished(state.step, state.seconds):
            state.done, state.total = budget.progress(state.step, state.seconds)
            state.lr = learning_rate(training, state.done / state.total)
            for group in optimiser.param_groups:
                group["lr"] = state.lr

            pixels, labels = feed.take(state.step)
            state.waited = feed.waited
            state.loss = torch.zeros((), device=device)
            optimiser.zero_grad(set_to_none=True)
            for piece in samples.chunk(training.accumulate):
                x, y = load_batch(config, pixels[piece], labels[piece], piece, state.step)
                place = Step(seed=config.seed, number=state.step, done=state.done, total=state.total, samples=piece)
                loss = objective(model, x, y, place)
                share = loss.per_sample.sum() / training.batch
                share.backward()
                state.loss += share.detach()
                state.stats = loss.stats
            state.gradient = torch.nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None], foreach=True
            )
            optimiser.step()
            for average in state.averages:
                average.update(model, state.step)

            state.step += 1
            state.seconds = time.monotonic() - started
            yield state
    finally:
        feed.close()


def load_batch(
    config: Config, pixels: Tensor, labels: Tensor, samples: Tensor, step: int
) -> tuple[Tensor, Tensor | None]:
    """Images as float32 in [-1, 1], mirrored where the draw says so, and their labels where the recipe uses them."""
    x = to_float(pixels)
    if config.data.flip:
        mirrored = flip_mask(samples, seed=config.seed, step=step)
        x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
    return x, labels if config.data.classes else None
