"""What every method owes the loop, whatever it minimises."""

import io
from dataclasses import replace

import pytest
import torch
from helpers import step_of, tiny_config
from rich.console import Console
from torch import Tensor, distributed

from ict.config import Config
from ict.experiment import run
from ict.model import ConsistencyModel, ModelSpec, build_model
from ict.objectives import OBJECTIVES, build_objective
from ict.ranks import Spread
from ict.sampling import load

METHODS = {
    "ict": {}, "ect": {}, "edm": {}, "sct": {"warmup": 0.9}, "continuous": {"distance": "squared_l2"}, "meanflow": {},
}  # fmt: skip


def config_of(kind: str) -> Config:
    return tiny_config(objective={"kind": kind, **METHODS[kind]}, net={"intervals": kind == "meanflow"})


def model_of(config: Config) -> ConsistencyModel:
    model = build_model(ModelSpec.from_config(config, tuple("0123456789"))).train()
    for number, parameter in enumerate(model.parameters()):  # also of layers that start as nothing
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
    return model


def batch(count: int = 6) -> tuple[Tensor, Tensor]:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1)) - 0.5, torch.arange(count)


def test_every_method_is_here():
    assert METHODS.keys() == OBJECTIVES.keys() - {"cd"}  # which needs a teacher's file: see test_diffusion.py


@pytest.mark.parametrize("kind", METHODS)
def test_progress_counts_by_the_tensors_of_a_phase_alone(kind):
    """A step can be recorded and played again: another phase, with the same shapes, is all that changes."""
    objective, (images, labels) = build_objective(config_of(kind)), batch()
    model, late, early = model_of(config_of(kind)), step_of(6, done=70), step_of(6, done=0)
    phase = objective.phase(late)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in phase.tensors.items()}
    assert shapes == {name: (tensor.shape, tensor.dtype) for name, tensor in objective.phase(early).tensors.items()}
    expected = objective(model, images, labels, late).per_sample
    assert torch.equal(objective(model, images, labels, replace(early, phase=phase)).per_sample, expected)
    if phase.tensors:
        assert not torch.equal(objective(model, images, labels, early).per_sample, expected)


@pytest.mark.parametrize("kind", METHODS)
def test_a_sample_does_not_depend_on_those_beside_it(kind):
    objective, model, (images, labels) = build_objective(config_of(kind)), model_of(config_of(kind)), batch()
    step = step_of(6, done=70)
    whole = objective(model, images, labels, step)
    for half in (slice(0, 2), slice(2, 6)):
        part = objective(model, images[half], labels[half], replace(step, samples=step.samples[half]))
        assert torch.allclose(part.per_sample, whole.per_sample[half], rtol=1e-4)
        assert torch.equal(part.sigma, whole.sigma[half])
    assert whole.per_sample.shape == (6,) and (whole.per_sample >= 0).all() and whole.output.requires_grad


@pytest.mark.parametrize("kind", METHODS)
def test_gradients_go_through_the_model_that_is_spread_over_ranks(kind, monkeypatch):
    """A call that goes around it would leave each rank with its own gradients, and no error."""
    monkeypatch.setattr(Spread, "forward", counted := Counted(Spread.forward))
    objective, (images, labels) = build_objective(config_of(kind)), batch()
    alone, ranked = model_of(config_of(kind)), model_of(config_of(kind))
    objective(alone, images, labels, step_of(6)).per_sample.mean().backward()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        student = Spread(ranked)
        loss = objective(student, images, labels, step_of(6))
        loss.per_sample.mean().backward()
    finally:
        distributed.destroy_process_group()
    assert counted.with_gradient == 1
    for ours, theirs in zip(alone.parameters(), ranked.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


class Counted:
    """A method that counts how often it is called where gradients are kept."""

    def __init__(self, original) -> None:
        self.original, self.with_gradient = original, 0

    def __get__(self, instance, owner):
        def call(*args, **kwargs):
            self.with_gradient += torch.is_grad_enabled()
            return self.original(instance, *args, **kwargs)

        return call


@pytest.mark.parametrize("kind", METHODS)
def test_it_trains_the_tiny_recipe(kind, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    path = run(config_of(kind), tmp_path / "run", device="cpu", console=console)
    levels = "noise levels: N = 3" if kind == "ict" else "noise levels: drawn from all of them"
    assert levels in console.file.getvalue()
    assert load(path).sample(2).isfinite().all()
