"""Easy consistency tuning: its levels, its loss, its way from diffusion to consistency training."""

import io
import math

import pytest
import torch
from helpers import gaussian_model, step_of, tiny_config
from rich.console import Console

from ict import rng
from ict.config import NoiseConfig
from ict.distance import pseudo_huber
from ict.experiment import run
from ict.objectives import build_objective
from ict.objectives.ect import lower_level
from ict.reading import ConfigError
from ict.rng import Stream
from ict.sampling import load

ECT = {"kind": "ect", "q": 2.0, "k": 8.0, "b": 1.0, "stages": 8, "c": 0.03}


def test_lower_levels_are_the_formula_and_draw_nearer():
    t = torch.tensor([0.01, 0.5, 3.0, 80.0], dtype=torch.float64)
    before = torch.zeros_like(t)
    for stage in range(12):
        r = lower_level(t, 2.0 ** -(stage + 1), k=8.0, b=1.0)
        expected = [max(0.0, x * (1 - (1 + 8 / (1 + math.exp(x))) / 2 ** (stage + 1))) for x in t.tolist()]
        assert r.tolist() == pytest.approx(expected, rel=1e-12)
        assert (r >= before).all() and (r < t).all()
        before = r
    assert lower_level(t[:2], 0.5, k=8.0, b=1.0).tolist() == [0.0, 0.0]  # it begins as diffusion
    assert (before / t > 0.99).all()


@pytest.mark.parametrize(("done", "stage"), [(0, 0), (12, 0), (13, 1), (50, 4), (99, 7), (100, 7)])
def test_the_loss_is_the_formula(done, stage):
    config, model, images = (
        tiny_config(objective=ECT),
        gaussian_model(0.7, NoiseConfig()),
        torch.rand(32, 1, 8, 8) - 0.5,
    )
    step = step_of(32, number=5, done=done)
    loss = build_objective(config)(model, images, None, step)
    assert loss.stats == {"stage": stage}
    level = rng.normal(step.samples, (1,), seed=0, step=5, stream=Stream.LEVEL)[:, 0].double()
    t = (-1.1 + 2.0 * level).exp().clamp(0.002 * 1.001, 80)
    r = lower_level(t, 2.0 ** -(stage + 1), k=8.0, b=1.0).clamp_min(0.002)
    z = rng.normal(step.samples, (1, 8, 8), seed=0, step=5)
    high, low = (model(images + s.float().reshape(-1, 1, 1, 1) * z, s).detach() for s in (t, r))
    expected = (t**2 + 0.25) / (0.5 * t) ** 2 * pseudo_huber(high, low, c=0.03)
    assert torch.allclose(loss.per_sample.double(), expected.double(), rtol=1e-5)


def test_no_gradient_goes_through_the_lower_side():
    model = gaussian_model(0.7, NoiseConfig())
    step, images = step_of(64, done=70), torch.rand(64, 1, 8, 8) - 0.5
    loss = build_objective(tiny_config(objective=ECT | {"distance": "squared_l2"}))(model, images, None, step)
    (gradient,) = torch.autograd.grad(loss.per_sample.mean(), model.net.log_s)
    t = loss.sigma
    r = lower_level(t, 2.0**-6, k=8.0, b=1.0).clamp_min(0.002)
    z = rng.normal(step.samples, (1, 8, 8), seed=0, step=0)
    high, low = (model(images + s.float().reshape(-1, 1, 1, 1) * z, s) for s in (t, r))
    weight = (t**2 + 0.25) / (0.5 * t) ** 2
    stopped = (weight * (high - low.detach()).square().sum((1, 2, 3))).mean()
    through = (weight * (high - low).square().sum((1, 2, 3))).mean()
    assert gradient.item() == pytest.approx(
        torch.autograd.grad(stopped, model.net.log_s, retain_graph=True)[0].item(), rel=1e-4
    )
    assert gradient.item() != pytest.approx(torch.autograd.grad(through, model.net.log_s)[0].item(), rel=1e-2)


def test_a_run_of_it(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    path = run(tiny_config(objective=ECT), tmp_path / "run", device="cpu", console=console)
    assert load(path).spec.kind == "consistency" and load(path).sample(2).isfinite().all()
    with pytest.raises(ConfigError, match=r"is for objective\.kind = ict and cd"):
        tiny_config(objective=ECT | {"teacher": "ema"})
