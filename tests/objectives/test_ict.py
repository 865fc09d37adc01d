import math

import pytest
import torch
from helpers import SpyNet, gaussian_model, step_of, tiny_config

from ict import rng
from ict.config import Config, NoiseConfig
from ict.model import ConsistencyModel, ModelSpec, build_model
from ict.nets.dropout import Dropout
from ict.noise import draw_pairs, karras_sigmas, lognormal_pmf
from ict.objectives import build_objective
from ict.objectives.ict import ImprovedConsistencyTraining
from ict.reading import ConfigError, from_dict


def spied(batch: int = 6, **objective):
    config = tiny_config(objective=objective)
    net = SpyNet()
    model = ConsistencyModel(net, config.noise, image_shape=(1, 8, 8)).train()
    images = torch.rand(batch, 1, 8, 8) * 2 - 1
    loss = build_objective(config)(model, images, None, step_of(batch))
    return net.calls, loss, images


def sigma_of(call) -> torch.Tensor:
    return torch.exp(4 * call["c_noise"].double())


def noisy_input(call) -> torch.Tensor:
    return call["x"].double() * torch.sqrt(sigma_of(call) ** 2 + 0.25).reshape(-1, 1, 1, 1)


def test_student_and_teacher_share_the_noise_and_stand_on_neighbouring_levels():
    (student, teacher), loss, images = spied(s0=8, s1=8)
    high, low = sigma_of(student), sigma_of(teacher)
    grid = karras_sigmas(9)
    index = (grid[None] - low[:, None]).abs().argmin(dim=1)
    assert torch.allclose(low, grid[index], rtol=1e-5) and torch.allclose(high, grid[index + 1], rtol=1e-5)
    z_high, z_low = ((noisy_input(c) - images) / sigma_of(c).reshape(-1, 1, 1, 1) for c in (student, teacher))
    visible = low > 0.01  # below, float32 hides the noise behind the image
    assert visible.any()
    assert torch.allclose(z_high[visible], z_low[visible], atol=1e-3)
    assert loss.stats == {"levels": 9}


def test_the_teacher_has_no_gradient_but_the_students_mode_and_key():
    (student, teacher), _, _ = spied()
    assert student["grad"] and not teacher["grad"]
    assert student["training"] and teacher["training"]
    assert torch.equal(student["key"], teacher["key"])


def test_loss_and_gradient_are_those_of_the_formula():
    """Written out by hand in float64, gradient included: λ d(f_θ(x + σ₊z, σ₊), stopgrad f_θ(x + σz, σ))."""
    noise = NoiseConfig()
    config = from_dict(Config, {"objective": {"s0": 10, "s1": 10}})
    model = gaussian_model(0.9, noise)
    images = 0.3 * torch.randn(64, 1, 8, 8, dtype=torch.float64)
    step = step_of(64, number=5, seed=3)
    loss = build_objective(config)(model, images, None, step)
    loss.per_sample.mean().backward()
    found = model.net.log_s.grad.item()

    u = rng.uniform(step.samples, 1, seed=3, step=5, stream=rng.Stream.LEVEL)[:, 0]
    z = rng.normal(step.samples, (1, 8, 8), seed=3, step=5).double()
    grid = karras_sigmas(11)
    i = torch.searchsorted(lognormal_pmf(grid).cumsum(0), u)
    low, high = grid[i], grid[i + 1]

    def f(log_s, x, sigma):
        s2 = torch.exp(2 * log_s)
        return x * torch.sqrt((s2 + 0.002**2) / (s2 + sigma**2)).reshape(-1, 1, 1, 1)

    log_s = torch.tensor(math.log(0.9), dtype=torch.float64, requires_grad=True)
    student = f(log_s, images + high.reshape(-1, 1, 1, 1) * z, high)
    teacher = f(log_s, images + low.reshape(-1, 1, 1, 1) * z, low).detach()
    c = 0.00054 * 8
    expected = (torch.sqrt((student - teacher).square().sum(dim=(1, 2, 3)) + c**2) - c) / (high - low)
    expected.mean().backward()
    assert torch.allclose(loss.per_sample, expected.detach(), rtol=1e-4)
    assert found == pytest.approx(log_s.grad.item(), rel=1e-4)


def test_dropout_masks_are_shared_in_a_real_net():
    config = tiny_config(net={"dropout": 0.5})
    model = build_model(ModelSpec.from_config(config, tuple("0123456789"))).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    dropped: list[torch.Tensor] = []
    for layer in model.modules():
        if isinstance(layer, Dropout):
            layer.register_forward_hook(lambda _m, _i, out: dropped.append(out == 0))
    images, labels = torch.rand(8, 1, 8, 8), torch.zeros(8, dtype=torch.long)
    build_objective(config)(model, images, labels, step_of(8))
    half = len(dropped) // 2
    assert half == 2 + 2 + 4  # down, middle, up
    for student, teacher in zip(dropped[:half], dropped[half:], strict=True):
        assert torch.equal(student, teacher) and 0.4 < student.float().mean() < 0.6
    build_objective(config)(model, images, labels, step_of(8, number=1))
    assert not torch.equal(dropped[0], dropped[2 * half])  # and fresh at the next step


@pytest.mark.parametrize("number", [0, 1])
def test_a_piece_of_a_batch_is_the_same_as_within_the_whole(number):
    """What accumulation and several ranks rely on: noise, level and dropout follow the sample."""
    config = tiny_config()
    model = build_model(ModelSpec.from_config(config, tuple("0123456789"))).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    images, labels = torch.rand(8, 1, 8, 8), torch.arange(8)
    objective = build_objective(config)
    whole = objective(model, images, labels, step_of(8, number=number)).per_sample
    from dataclasses import replace

    for piece in torch.arange(8).split(3):
        step = replace(step_of(8, number=number), samples=piece)
        part = objective(model, images[piece], labels[piece], step).per_sample
        assert torch.allclose(part, whole[piece], rtol=1e-4)


def test_levels_follow_the_curriculum():
    objective = ImprovedConsistencyTraining(from_dict(Config, {}))
    model = ConsistencyModel(SpyNet(), NoiseConfig(), image_shape=(1, 8, 8))
    for done, n in ((0, 11), (49_999, 11), (50_000, 21), (350_000, 1281), (400_000, 1281)):
        loss = objective(model, torch.zeros(2, 1, 8, 8), None, step_of(2, done=done, total=400_000))
        assert loss.stats["levels"] == n


def test_drawn_levels_have_the_lognormal_distribution():
    objective = ImprovedConsistencyTraining(from_dict(Config, {}))
    step = step_of(50_000)
    low, _ = objective.draw_levels(objective.phase(step), step)
    share = torch.stack([(low == sigma).double().mean() for sigma in karras_sigmas(11)[:-1]])
    assert (share - lognormal_pmf(karras_sigmas(11))).abs().max() < 0.007


def test_levels_keep_float64():
    """The grid's own numbers, not their float32 neighbours: at N = 1281 the gaps are small."""
    objective, step = ImprovedConsistencyTraining(from_dict(Config, {})), step_of(100, done=99, total=100)
    low, high = objective.draw_levels(objective.phase(step), step)
    grid = karras_sigmas(1281)
    assert low.dtype == high.dtype == torch.float64
    assert torch.isin(low, grid).all() and torch.isin(high, grid).all()


@pytest.mark.parametrize("curriculum", ["exponential", "sqrt", "linear", "square", "cosine", "constant"])
def test_the_tensors_of_a_phase_never_change_their_shapes(curriculum):
    """A step that was recorded is played again with the numbers of another N; none beyond them is ever drawn."""
    section = {"curriculum": curriculum, "s0": 2, "s1": 40}
    objective = ImprovedConsistencyTraining(from_dict(Config, {"objective": section}))
    seen = set()
    for done in range(101):
        step = step_of(1000, done=done, total=100)
        phase = objective.phase(step)
        n = int(phase.figures["levels"])
        seen.add(n)
        assert phase.tensors["sigmas"].shape == (41,) and phase.tensors["cdf"].shape == (40,)
        low, high = objective.draw_levels(phase, step)
        assert torch.isin(high, karras_sigmas(n)).all() and (high > low).all()
        u = torch.tensor([1 - 2.0**-33], dtype=torch.float64)
        assert draw_pairs(phase.tensors["cdf"], u).item() == n - 2
    assert max(seen) == 41


@pytest.mark.parametrize("key", ["curriculum", "index", "weighting", "distance", "kind"])
def test_an_unknown_name_is_refused_with_the_choices(key):
    with pytest.raises(ConfigError, match=f"objective.{key} = 'nonsense' is not known.*choose from"):
        build_objective(tiny_config(objective={key: "nonsense"}))


# --- what the theory says


def proposition_model(x, sigma, theta, sigma_min):
    return sigma_min / sigma * x + (1 - sigma_min / sigma) * theta


def proposition_loss(theta, teacher, xi, n, *, sigma_min=0.05, sigma_max=2.0, samples=200_000):
    """L^N of §3.2: δ-data at ξ, λ = 1, squared ℓ2, linear levels; by Monte Carlo with one draw for all N."""
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(samples, generator=generator, dtype=torch.float64)
    z = torch.randn(samples, generator=generator, dtype=torch.float64)
    grid = torch.linspace(sigma_min, sigma_max, n, dtype=torch.float64)
    i = (u * (n - 1)).long()
    low, high = grid[i], grid[i + 1]
    student = proposition_model(xi + high * z, high, theta, sigma_min)
    target = proposition_model(xi + low * z, low, teacher, sigma_min).detach()
    return (student - target).square().mean(), low


def test_proposition_1_with_another_teacher():
    """lim L^N = E[(1 − σ_min/σ)²](θ − θ⁻)²: no trace of ξ."""
    theta, teacher = torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.2, dtype=torch.float64)
    for xi in (-3.0, 1.0):
        loss, sigma = proposition_loss(theta, teacher, xi, 20_001)
        limit = ((1 - 0.05 / sigma) ** 2).mean() * (theta - teacher) ** 2
        assert loss.item() == pytest.approx(limit.item(), rel=5e-3)


@pytest.mark.parametrize("xi", [-3.0, 1.0])
def test_proposition_1_with_the_students_own_weights(xi):
    """lim (1/Δσ) dL/dθ = d/dθ E[σ_min/σ² (1 − σ_min/σ)(θ − ξ)²]: it pulls θ to ξ."""
    n = 20_001
    theta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    loss, sigma = proposition_loss(theta, theta, xi, n)
    loss.backward()
    delta = (2.0 - 0.05) / (n - 1)
    limit = 2 * (0.05 / sigma**2 * (1 - 0.05 / sigma)).mean() * (theta.detach() - xi)
    assert theta.grad.item() / delta == pytest.approx(limit.item(), rel=1e-2)


def test_proposition_1_diverges_with_another_teacher():
    """±∞, by the sign of θ − θ⁻: the scaled gradient grows like N."""
    scaled = []
    for n in (101, 1001):
        theta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        loss, _ = proposition_loss(theta, torch.tensor(0.2, dtype=torch.float64), 1.0, n)
        loss.backward()
        scaled.append(theta.grad.item() * (n - 1))
    assert scaled[0] > 0 and scaled[1] / scaled[0] == pytest.approx(10, rel=0.1)


def gaussian_loss(s_model: float, s_data: float, n: int, *, batch: int = 4000) -> float:
    config = from_dict(
        Config, {"objective": {"s0": n - 1, "s1": n - 1, "distance": "squared_l2", "weighting": "uniform"}}
    )
    images = s_data * rng.normal(torch.arange(batch), (1, 8, 8), seed=9, step=0)
    with torch.no_grad():
        loss = build_objective(config)(gaussian_model(s_model, config.noise), images, None, step_of(batch))
    return loss.per_sample.mean().item() / 64


def test_exact_function_has_vanishing_loss():
    """For Gaussian data the exact consistency function's loss falls like 1/N², to nothing."""
    losses = [gaussian_loss(0.5, 0.5, n) for n in (81, 161, 321, 1281)]
    assert losses[-1] < 1e-4
    assert losses[0] / losses[1] == pytest.approx(4, rel=0.25)
    assert losses[1] / losses[2] == pytest.approx(4, rel=0.25)


@pytest.mark.parametrize(("distance", "tolerance"), [("squared_l2", 0.02), ("pseudo_huber", 0.03)])
@pytest.mark.parametrize("start", [0.2, 1.5])
def test_training_converges_to_the_exact_function(distance, tolerance, start):
    """One weight, the standard deviation that the net believes in, finds that of the data."""
    config = from_dict(Config, {"objective": {"s0": 320, "s1": 320, "distance": distance}})
    model, objective = gaussian_model(start, config.noise), build_objective(config)
    optimiser = torch.optim.RAdam(model.parameters(), lr=0.03)
    tail = []
    for number in range(400):
        images = 0.5 * rng.normal(torch.arange(256), (1, 8, 8), seed=1, step=number, stream=rng.Stream.FLIP)
        optimiser.zero_grad()
        objective(model, images, None, step_of(256, number=number)).per_sample.mean().backward()
        optimiser.step()
        tail.append(model.net.log_s.item())
    assert math.exp(sum(tail[-100:]) / 100) == pytest.approx(0.5, rel=tolerance)
