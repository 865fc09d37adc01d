"""Continuous-time consistency training: the limit that it is, and the derivatives that it is made of."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import gaussian_model, step_of, tiny_config
from torch import Tensor, nn

from ict.config import Config, NoiseConfig
from ict.model import ConsistencyModel, ModelSpec, build_model
from ict.noise import LEVEL_QUANTILES, draw_pairs, karras_gap, karras_sigmas, lognormal_pmf
from ict.objectives import build_objective
from ict.objectives.base import add_noise
from ict.objectives.tangent import derivative, pull, shown_as
from ict.reading import ConfigError, from_dict

NOISE = NoiseConfig()
PAIRS = [500, 1000, 2000, 4000, 8000]


class SmoothNet(nn.Module):
    """A net of double precision with all that a derivative may go wrong in: image, level and both together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(a, b, 3, padding=1, dtype=torch.float64) for a, b in ((1, 6), (6, 1)))
        self.level = nn.Linear(1, 6, dtype=torch.float64)

    def forward(self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        h = self.first(x.double()) * (1 + self.level(c_noise.double()[:, None]).sin()[..., None, None])
        return self.second(nn.functional.silu(h))


def smooth_model() -> ConsistencyModel:
    return ConsistencyModel(SmoothNet(), NOISE, image_shape=(1, 8, 8))


def gradient(model: ConsistencyModel, images: Tensor, **objective) -> Tensor:
    config = from_dict(Config, {"objective": objective})
    loss = build_objective(config)(model, images, None, step_of(len(images)))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss.per_sample.mean(), [*model.parameters()])])


@pytest.mark.parametrize("index", ["lognormal", "uniform"])
@pytest.mark.parametrize("distance", ["squared_l2", "pseudo_huber"])
@pytest.mark.parametrize("weighting", ["inverse_gap", "uniform"])
def test_the_gradient_is_the_limit_of_that_of_finer_grids(index, distance, weighting):
    """The same draws on grids of N levels: the error of the gradient falls as 1/N, the order is 1. With uniform weights
    it is (N − 1) times the gradient that has a limit."""
    model, images = smooth_model(), torch.rand(1024, 1, 8, 8, dtype=torch.float64) - 0.5
    common = {"index": index, "distance": distance, "weighting": weighting, "c": 3.0}
    limit = gradient(model, images, kind="continuous", s0=1, s1=1, **common)
    errors = []
    for pairs in PAIRS:
        fine = gradient(model, images, curriculum="constant", s0=pairs, s1=pairs, **common)
        scale = pairs if weighting == "uniform" else 1
        errors.append(((scale * fine - limit).norm() / limit.norm()).item())
    order = -np.polyfit(np.log(PAIRS), np.log(errors), 1)[0]
    print(f"{index}, {distance}, {weighting}: {errors}, order {order:.2f}")
    assert errors[-1] < 0.01 and 0.9 < order < 1.15


def test_with_one_level_and_one_noise_the_order_is_one_too():
    """σ and z fixed, the gap halved five times: (1 / gap) · gradient of ‖f(σ) − stopgrad f(σ − gap)‖²."""
    model, images, z = smooth_model(), torch.rand(4, 1, 8, 8, dtype=torch.float64), torch.randn(4, 1, 8, 8).double()
    sigma = torch.tensor([0.05, 0.5, 3.0, 40.0], dtype=torch.float64)

    def pulled(loss: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss.sum(), [*model.parameters()])])

    answer = model(add_noise(images, sigma, z), sigma)
    slope = derivative(lambda x, s: model(x, s), (add_noise(images, sigma, z), sigma), (z, torch.ones(4).double()))[1]
    limit = pulled(2 * pull(answer, slope))
    errors = []
    for gap in (0.08 / 2**k * sigma for k in range(6)):
        below = model(add_noise(images, sigma - gap, z), sigma - gap).detach()
        answer = model(add_noise(images, sigma, z), sigma)
        errors.append((pulled((answer - below).square().sum((1, 2, 3)) / gap) - limit).norm().item())
    orders = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    print(f"orders {[f'{order:.3f}' for order in orders]}")
    assert all(0.9 < order < 1.1 for order in orders)


def test_the_loss_that_is_shown_is_the_squared_speed():
    model, images = smooth_model(), torch.rand(6, 1, 8, 8, dtype=torch.float64)
    objective = build_objective(from_dict(Config, {"objective": {"kind": "continuous", "distance": "squared_l2"}}))
    step = step_of(6)
    loss = objective(model, images, None, step)
    z, sigma, h = step.noise(images, step.samples).double(), loss.sigma, 1e-3
    ahead, behind = (model(add_noise(images, s, z), s) for s in (sigma * (1 + h), sigma * (1 - h)))
    speed = (ahead - behind) / (2 * h * sigma).reshape(-1, 1, 1, 1)
    assert torch.allclose(loss.per_sample, speed.square().sum((1, 2, 3)), rtol=1e-3)
    assert loss.stats == {} and objective.phase(step).tensors == {}


def test_levels_are_the_limits_of_the_grids():
    u = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    sigmas = karras_sigmas(200_001)
    drawn = sigmas[draw_pairs(lognormal_pmf(sigmas).cumsum(0), u)]
    assert torch.allclose(LEVEL_QUANTILES["lognormal"](u), drawn, rtol=1e-3)
    assert torch.allclose(LEVEL_QUANTILES["uniform"](u), sigmas[(u * 200_000).long()], rtol=1e-3)
    for mean, std in ((-1.1, 2.0), (9.0, 1.0), (-12.0, 1.0)):  # also from far out on one side
        drawn = sigmas[draw_pairs(lognormal_pmf(sigmas, p_mean=mean, p_std=std).cumsum(0), u)]
        assert torch.allclose(LEVEL_QUANTILES["lognormal"](u, p_mean=mean, p_std=std), drawn, rtol=1e-3)
    with pytest.raises(ValueError, match="put no weight"):
        LEVEL_QUANTILES["lognormal"](u, p_mean=400.0, p_std=1.0)
    gaps = sigmas[1:] - sigmas[:-1]
    assert torch.allclose(karras_gap(sigmas[1:], 200_001), gaps, rtol=1e-3)


@pytest.mark.parametrize(("s", "sign"), [(0.5, 0), (0.7, 1), (0.3, -1)])
def test_gaussian_data_pulls_towards_its_own_deviation(s, sign):
    """At the exact consistency function of data ~ N(0, ½²) the mean of df/dσ given x is 0, and so is the gradient."""
    model, images = gaussian_model(s, NOISE), 0.5 * torch.randn(4096, 1, 8, 8)
    loss = build_objective(tiny_config(objective={"kind": "continuous", "distance": "squared_l2"}))(
        model, images, None, step_of(4096)
    )
    parts = torch.stack(
        [torch.autograd.grad(p.mean(), model.net.log_s, retain_graph=True)[0] for p in loss.per_sample.chunk(64)]
    )
    score = (parts.mean() / (parts.std() / math.sqrt(64))).item()
    assert abs(score) < 4 if sign == 0 else sign * score > 8


@pytest.mark.parametrize("kind", ["unet", "ncsnpp", "adm"])
def test_derivatives_of_the_real_nets_are_those_of_differences(kind):
    """With attention, dropout and labels; the same key gives the same mask on the way, another key another."""
    net = {"kind": kind, "dropout": 0.3, "channels": 16, "fourier_scale": 0.2}
    model = build_model(ModelSpec.from_config(tiny_config(net=net), tuple("0123456789"))).train()
    for parameter in model.parameters():  # also of layers that start as nothing
        nn.init.normal_(parameter, std=0.1)
    x, z, labels, key = torch.rand(3, 1, 8, 8), torch.randn(3, 1, 8, 8), torch.arange(3), torch.arange(3)
    sigma = torch.tensor([0.2, 0.9, 5.0], dtype=torch.float64)

    def moved(h: float) -> Tensor:
        return model(add_noise(x, sigma + h, z), sigma + h, labels, key).detach()

    def speed(key: Tensor) -> tuple[Tensor, Tensor]:
        start, direction = (add_noise(x, sigma, z), sigma), (z, torch.ones_like(sigma))
        return derivative(lambda x, s: model(x, s, labels, key), start, direction)

    value, slope = speed(key)
    assert torch.allclose(value, moved(0.0), atol=1e-5) and not slope.requires_grad
    difference = (moved(0.01) - moved(-0.01)) / 0.02
    error = (slope - difference).norm()
    assert error < 0.01 * difference.norm()
    assert (speed(key + 7)[1] - difference).norm() > 4 * error


def test_losses_that_are_known_by_their_gradients():
    x = torch.randn(3, 1, 2, 2, requires_grad=True)
    slope = torch.randn(3, 1, 2, 2)
    loss = pull(x, slope)
    assert torch.allclose(loss, 0.5 * slope.square().sum((1, 2, 3)))
    assert torch.allclose(torch.autograd.grad(loss.sum(), x)[0], slope)
    shown = shown_as(pull(x, slope), torch.tensor([1.0, 2.0, 3.0]))
    assert torch.allclose(shown, torch.tensor([1.0, 2.0, 3.0]))
    assert torch.allclose(torch.autograd.grad(shown.sum(), x)[0], slope)


@pytest.mark.parametrize("distance", ["l1", "lpips"])
def test_a_distance_that_is_not_smooth_is_refused(distance):
    with pytest.raises(ConfigError, match="choose from squared_l2, pseudo_huber"):
        build_objective(tiny_config(objective={"kind": "continuous", "distance": distance}))
