"""sCT: its tangent against differences, its exact cases, its warm-up, and a run of it."""

import io
import math

import pytest
import torch
from helpers import DeltaNet, gaussian_model, step_of, tiny_config
from rich.console import Console
from torch import Tensor

from ict.config import NoiseConfig
from ict.experiment import run
from ict.model import ConsistencyModel
from ict.objectives import build_objective
from ict.objectives.base import add_noise
from ict.objectives.sct import SimplifiedConsistencyTraining
from ict.reading import ConfigError
from ict.sampling import load

NOISE = NoiseConfig()
SCT = {"kind": "sct", "p_mean": -1.0, "p_std": 1.4}


def objective(**changes) -> SimplifiedConsistencyTraining:
    return build_objective(tiny_config(objective=SCT | changes))


def trig(model: ConsistencyModel, images: Tensor, z: Tensor, t: Tensor) -> Tensor:
    """f of TrigFlow, as the paper writes it, at a time t [B] on the path of images and noise."""
    cos, sin = (each.reshape(-1, 1, 1, 1) for each in (t.cos(), t.sin()))
    x = cos * images + sin * 0.5 * z
    return cos * x - sin * 0.5 * -model.net(x / 0.5, 0.25 * (0.5 * t.tan()).log())


def test_trigflow_is_the_model_with_a_lowest_level_of_zero():
    model, images, z = gaussian_model(0.7, NOISE), torch.rand(4, 1, 8, 8).double(), torch.randn(4, 1, 8, 8).double()
    sigma = torch.tensor([0.1, 0.8, 5.0, 80.0], dtype=torch.float64)
    ours = model(add_noise(images, sigma, z), sigma)
    assert torch.allclose(ours[1:], trig(model, images, z, torch.atan(sigma / 0.5))[1:], rtol=1e-2, atol=1e-2)
    model.kind = "diffusion"  # whose c_skip and c_out have σ_min = 0
    ours = model(add_noise(images, sigma, z), sigma)
    assert torch.allclose(ours, trig(model, images, z, torch.atan(sigma / 0.5)), rtol=1e-5, atol=1e-6)


def test_the_tangent_is_the_derivative_along_the_circle():
    model, images, z = gaussian_model(0.7, NOISE), torch.rand(4, 1, 8, 8).double(), torch.randn(4, 1, 8, 8).double()
    sigma = torch.tensor([0.05, 0.5, 3.0, 60.0], dtype=torch.float64)
    t, h = torch.atan(sigma / 0.5), 1e-3 * torch.atan(sigma / 0.5).cos()
    slope = (trig(model, images, z, t + h) - trig(model, images, z, t - h)) / (2 * h).reshape(-1, 1, 1, 1)
    g = objective().tangent(model, images, sigma, z, None, None, share=1.0)
    assert torch.allclose(g, t.cos().reshape(-1, 1, 1, 1) * slope, rtol=2e-3, atol=2e-4)
    # Without its second part it is that of diffusion: F goes to dx_t/dt.
    cos, sin = (each.reshape(-1, 1, 1, 1) for each in (t.cos(), t.sin()))
    f = -model.net((cos * images + sin * 0.5 * z) / 0.5, 0.25 * sigma.log())
    first = -(cos**2) * (0.5 * f - (cos * 0.5 * z - sin * images))
    assert torch.allclose(objective().tangent(model, images, sigma, z, None, None, share=0.0), first, atol=1e-6)


def test_one_image_and_its_exact_function_have_no_tangent():
    image = torch.rand(1, 1, 8, 8, dtype=torch.float64) - 0.5
    model = ConsistencyModel(DeltaNet(image, sigma_min=0.0), NOISE, image_shape=(1, 8, 8))
    sigma, z = torch.tensor([0.05, 0.5, 3.0, 60.0]).double(), torch.randn(4, 1, 8, 8).double()
    g = objective().tangent(model, image.expand(4, -1, -1, -1), sigma, z, None, None, share=1.0)
    assert g.abs().max() < 1e-5


@pytest.mark.parametrize(("power", "floor"), [(0.0, 0.1), (1.0, 0.1), (0.0, 3.0)])
def test_the_gradient_is_the_papers(power, floor):
    """∇_θ w ‖F_θ − F_θ⁻ − g / (‖g‖ + c)‖² by hand, through the net instead of through the model."""
    model, images, step = gaussian_model(0.7, NOISE), torch.rand(16, 1, 8, 8).double() - 0.5, step_of(16, done=50)
    ours = objective(power=power, warmup=0.0, **({} if floor == 0.1 else {"floor": floor}))
    loss = ours(model, images, None, step)
    (found,) = torch.autograd.grad(loss.per_sample.sum(), model.net.log_s)
    sigma, z = loss.sigma, step.noise(images, step.samples).double()
    g = ours.tangent(model, images, sigma, z, None, None, share=1.0)
    length = g.flatten(1).norm(dim=1)
    assert torch.allclose(loss.per_sample, length / 8)
    unit = g / (length + floor).reshape(-1, 1, 1, 1)
    x = add_noise(images, sigma, z) / torch.sqrt(sigma**2 + 0.25).reshape(-1, 1, 1, 1)
    f = -model.net(x, 0.25 * sigma.log())
    squared = (f - f.detach() - unit).flatten(1).square().sum(1)
    weight = (squared.detach() + 1e-3) ** -power
    (expected,) = torch.autograd.grad((weight * squared).sum(), model.net.log_s)
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(("s", "sign"), [(0.5, 0), (0.7, 1), (0.3, -1)])
def test_gaussian_data_pulls_towards_its_own_deviation(s, sign):
    """Without normalising, its gradient is that of continuous-time training with another weight."""
    images, step, model = 0.5 * torch.randn(4096, 1, 8, 8), step_of(4096), gaussian_model(s, NOISE)
    sigma, z = step.lognormal(-1.0, 1.4).clamp(0.01, 80.0), step.noise(images, step.samples)
    g = objective().tangent(model, images, sigma, z, None, None, share=1.0)
    f = -model.net(
        add_noise(images, sigma, z) / torch.sqrt(sigma**2 + 0.25).float().reshape(-1, 1, 1, 1), 0.25 * sigma.log()
    )
    pulls = -(g * f).flatten(1).sum(1)
    parts = torch.stack([torch.autograd.grad(p.mean(), model.net.log_s, retain_graph=True)[0] for p in pulls.chunk(64)])
    score = (parts.mean() / (parts.std() / math.sqrt(64))).item()
    assert abs(score) < 4 if sign == 0 else sign * score > 8


@pytest.mark.parametrize(("done", "share"), [(0, 0.0), (5, 0.25), (20, 1.0), (100, 1.0)])
def test_the_warm_up_follows_progress(done, share):
    phase = objective(warmup=0.2).phase(step_of(2, done=done))
    assert phase.tensors["share"].item() == share and phase.figures == {"share": share}
    assert objective(warmup=0.0).phase(step_of(2, done=0)).figures == {"share": 1.0}


def test_a_run_of_it_and_the_run_gone_on_with_are_equal(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    config = tiny_config(objective=SCT | {"warmup": 0.5})
    path = run(config, tmp_path / "run", device="cpu", console=console)
    assert "noise levels: drawn from all of them" in console.file.getvalue()
    assert load(path).spec.kind == "consistency" and load(path).sample(2, steps=2).isfinite().all()
    (tmp_path / "run" / "model.safetensors").unlink()
    for late in ("step-00000008", "step-00000012"):
        for file in (tmp_path / "run" / "checkpoints" / late).iterdir():
            file.unlink()
        (tmp_path / "run" / "checkpoints" / late).rmdir()
    before = load(path.parent).model.state_dict()
    again = run(config, tmp_path / "run", device="cpu", console=console, resume=True)
    whole = run(config, tmp_path / "whole", device="cpu", console=console)
    ours, theirs = load(again).model.state_dict(), load(whole).model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not all(torch.equal(ours[name], before[name]) for name in ours)


@pytest.mark.parametrize("key", ["warmup", "power", "apart"])
def test_shares_are_shares(key):
    with pytest.raises(ConfigError, match=rf"objective\.{key}"):
        objective(**{key: 1.5})
