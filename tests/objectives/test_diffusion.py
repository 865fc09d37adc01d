"""Diffusion, its sampler, and distillation from it, where the exact answer is known."""

import io
import itertools
import math

import pytest
import torch
from helpers import diffusion_file, gaussian_model, step_of, tiny_config
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

from ict import rng
from ict.cli import app
from ict.config import NoiseConfig
from ict.experiment import run
from ict.model import ConsistencyModel, ModelSpec, build_model, pack_model
from ict.noise import karras_sigmas
from ict.objectives import Loss, build_objective
from ict.objectives.distillation import ConsistencyDistillation
from ict.objectives.ict import ImprovedConsistencyTraining
from ict.reading import ConfigError
from ict.rng import Stream
from ict.sampling import Generator, load, solve, trajectory
from ict.solvers import SOLVERS, euler, heun

NOISE = NoiseConfig()


class Exact(nn.Module):
    """A diffusion model whose denoiser is a formula."""

    kind, noise, image_shape, classes, start = "diffusion", NOISE, (1, 8, 8), 0, None

    def __init__(self, denoise):
        super().__init__()
        self.denoise = denoise

    def forward(self, x: Tensor, sigma: Tensor, label: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        return self.denoise(x.double(), sigma.double().reshape(-1, 1, 1, 1))


def gaussian(s: float):
    """The mean of x₀ ~ N(0, s²) given x₀ + σ z."""
    return lambda x, sigma: s**2 / (s**2 + sigma**2) * x


def two_points(x: Tensor, sigma: Tensor) -> Tensor:
    """The same for pixels that are −0.5 or 0.5: tanh, each pixel by itself."""
    return 0.5 * torch.tanh(0.5 * x / sigma**2)


def test_a_diffusion_model_has_edms_preconditioning():
    class Net(nn.Module):
        def forward(self, x, c_noise, label=None, key=None):
            self.seen = x, c_noise
            return torch.ones_like(x)

    net, sigma = Net(), torch.tensor([0.01, 0.7, 50.0], dtype=torch.float64)
    model = ConsistencyModel(net, NOISE, image_shape=(1, 8, 8), kind="diffusion")
    x, data = torch.randn(3, 1, 8, 8, dtype=torch.float64), 0.5
    out, column = model(x, sigma), sigma.reshape(-1, 1, 1, 1)
    root = (column**2 + data**2).sqrt()
    assert torch.allclose(out, data**2 / root**2 * x + column * data / root, atol=1e-12)
    assert torch.allclose(net.seen[0], x / root) and torch.allclose(net.seen[1].double(), sigma.log() / 4, atol=1e-6)


def test_the_loss_is_the_formula():
    config = tiny_config(objective={"kind": "edm", "p_mean": -1.2, "p_std": 1.2}, data={"classes": 0})
    model = build_model(ModelSpec.from_config(config, ())).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    images, step = torch.rand(6, 1, 8, 8) * 2 - 1, step_of(6, number=3)
    loss = build_objective(config)(model, images, None, step)
    level = rng.normal(step.samples, (1,), seed=0, step=3, stream=Stream.LEVEL)[:, 0].double()
    z = rng.normal(step.samples, (1, 8, 8), seed=0, step=3)
    sigma = (-1.2 + 1.2 * level).exp()
    denoised = model(images + sigma.float().reshape(-1, 1, 1, 1) * z, sigma)
    weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
    expected = weight * (denoised - images).square().mean((1, 2, 3))
    assert torch.allclose(loss.per_sample.double(), expected, rtol=1e-5)
    assert torch.equal(loss.sigma, sigma)


def test_the_levels_are_lognormal():
    config = tiny_config(objective={"kind": "edm", "p_mean": -1.2, "p_std": 1.2}, data={"classes": 0})
    model = build_model(ModelSpec.from_config(config, ()))
    loss = build_objective(config)(model.eval(), torch.zeros(20_000, 1, 8, 8), None, step_of(20_000))
    logs = loss.sigma.log()
    assert logs.mean().item() == pytest.approx(-1.2, abs=0.03) and logs.std().item() == pytest.approx(1.2, abs=0.03)


@pytest.mark.parametrize(("solver", "order"), [(euler, 1), (heun, 2)])
def test_solvers_converge_at_their_order(solver, order):
    s, x = 0.5, torch.randn(4, 1, 8, 8, dtype=torch.float64)
    start, end = 3.0, 0.1
    exact = x * math.sqrt((s**2 + end**2) / (s**2 + start**2))
    errors = []
    for steps in (64, 128, 256):
        y = x
        for high, low in torch.linspace(start, end, steps + 1, dtype=torch.float64).unfold(0, 2, 1):
            y = solver(lambda x, sigma: gaussian(s)(x, sigma.reshape(-1, 1, 1, 1)), y, high.expand(4), low.expand(4))
        errors.append((y - exact).abs().max().item())
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.15)


def test_the_sampler_reaches_the_exact_answer():
    """Gaussian data: each sample is the noise, scaled. Two points: nearly all pixels end at one of them, half each."""
    numbers = torch.arange(64)
    z = rng.normal(numbers, (1, 8, 8), seed=0, step=0, stream=Stream.SAMPLING).double()
    x = solve(Exact(gaussian(0.5)), numbers, sigmas=trajectory(200, NOISE), seed=0, labels=None, clip=False)
    exact = 80 * z * 0.5 / math.sqrt(0.25 + 80**2)
    assert (x - exact).abs().max() < 2e-3
    y = solve(Exact(two_points), numbers, sigmas=trajectory(100, NOISE), seed=0, labels=None, clip=False)
    assert ((y.abs() - 0.5).abs() < 0.01).double().mean() > 0.98
    assert torch.equal(y[z.abs() > 0.1] > 0, z[z.abs() > 0.1] > 0)  # the ODE keeps the sign


def test_trajectories():
    assert trajectory(18, NOISE)[0] == 80.0 and trajectory(18, NOISE)[-1] == 0.002 and len(trajectory(18, NOISE)) == 18
    expected = karras_sigmas(18).flip(0).tolist()
    assert trajectory(18, NOISE) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ConfigError, match="2 to 1000"):
        trajectory(1, NOISE)


# --- distillation


def distiller(denoise, monkeypatch, **objective) -> ConsistencyDistillation:
    monkeypatch.setattr(ConsistencyDistillation, "load", lambda self, device: Exact(denoise))
    section = {"kind": "cd", "teacher_model": "formula", "distance": "squared_l2", "curriculum": "constant"}
    return build_objective(tiny_config(objective=section | objective, data={"classes": 0}))


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_training_and_distillation_coincide_on_one_image(solver, monkeypatch):
    """The toy of Proposition 1: all the data is one image, so that its exact denoiser always answers with it.

    Then a step of either solver ends where less of the same noise does, and the losses agree to rounding.
    """
    image = torch.rand(1, 1, 8, 8, dtype=torch.float64) - 0.5
    ours = distiller(lambda x, sigma: image.expand_as(x), monkeypatch, solver=solver, s0=8, s1=8)
    config = tiny_config(objective={"distance": "squared_l2", "curriculum": "constant", "s0": 8, "s1": 8})
    model = gaussian_model(0.7, NOISE)
    for number in range(3):
        step, images = step_of(16, number=number), image.expand(16, -1, -1, -1)
        distilled = ours(model, images, None, step).per_sample
        trained = ImprovedConsistencyTraining(config)(model, images, None, step).per_sample
        assert trained.min() > 1e-7
        assert torch.allclose(distilled, trained, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2)])
def test_the_exact_consistency_function_is_what_distillation_looks_for(solver, order, monkeypatch):
    """For Gaussian data both the denoiser and the consistency function are known: their loss falls with N as the
    solver's error does, while that of consistency training stays, as it has the noise of its single images."""
    model, step = gaussian_model(0.5, NOISE), step_of(256)
    images = 0.5 * torch.randn(256, 1, 8, 8)
    losses = []
    for n in (40, 80, 160):
        ours = distiller(gaussian(0.5), monkeypatch, solver=solver, s0=n, s1=n, weighting="uniform", index="uniform")
        losses.append(ours(model, images.double(), None, step).per_sample.mean().sqrt().item())
    for coarse, fine in itertools.pairwise(losses):
        assert math.log2(coarse / fine) > order + 0.5  # one order more for a single step


def test_what_is_distilled_must_be_a_diffusion_model(tmp_path):
    spec = ModelSpec(image_size=8, channels=1, net=tiny_config().net)
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack_model(spec, build_model(spec).state_dict(), {}))
    with pytest.raises(ConfigError, match="name its file"):
        build_objective(tiny_config(objective={"kind": "cd"}))
    objective = build_objective(tiny_config(objective={"kind": "cd", "teacher_model": str(path)}))
    with pytest.raises(ConfigError, match="must be a diffusion model"):
        objective(gaussian_model(0.5, NOISE), torch.zeros(2, 1, 8, 8), None, step_of(2))


def test_from_diffusion_to_distillation_and_to_a_start(tmp_path):
    """The whole way by recipes: a diffusion model is trained, sampled, distilled, and started from."""
    console = Console(file=io.StringIO(), width=200)
    teacher = run(tiny_config(objective={"kind": "edm"}), tmp_path / "edm", device="cpu", console=console)
    assert "noise levels: drawn from all of them" in console.file.getvalue()
    assert load(teacher).spec.kind == "diffusion"
    few, many = (load(teacher).sample(4, steps=steps) for steps in (None, 40))
    assert few.isfinite().all() and not torch.equal(few, many)
    page = (tmp_path / "edm" / "report.html").read_text()
    assert "18 steps" in page and "One step" not in page
    section = {"kind": "cd", "teacher_model": str(teacher), "teacher": "ema", "distance": "l1"}
    student = run(tiny_config(objective=section), tmp_path / "cd", device="cpu", console=console)
    assert load(student).spec.kind == "consistency" and load(student).sample(2).isfinite().all()
    config = tiny_config(training={"start": str(teacher), "steps": 1, "lr": 1e-12})
    started = run(config, tmp_path / "started", device="cpu", console=console)
    ours, theirs = load(started).model.state_dict(), load(teacher).model.state_dict()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)
    other = tiny_config(net={"channels": 16}, training={"start": str(teacher)})
    with pytest.raises(ConfigError, match=r"not the recipe's: net\.channels is 8 there, 16 here$"):
        run(other, tmp_path / "other", device="cpu", console=console)


def test_a_generator_of_diffusion_takes_many_steps():
    spec = ModelSpec(image_size=8, channels=1, kind="diffusion", net=tiny_config().net)
    generator = Generator(build_model(spec), spec)
    assert len(generator.ladder()) == 18 and len(generator.ladder(5)) == 5
    with pytest.raises(ConfigError, match="2 to 1000"):
        generator.sample(1, steps=1)


def test_a_run_that_goes_back_to_its_start_goes_back_to_the_model_it_started_from(tmp_path, monkeypatch):
    console = Console(file=io.StringIO(), width=200)
    teacher = run(tiny_config(objective={"kind": "edm"}), tmp_path / "edm", device="cpu", console=console)
    original = ImprovedConsistencyTraining.__call__

    def spoiled(self, model, images, labels, place):
        loss = original(self, model, images, labels, place)
        return Loss(loss.per_sample * (math.nan if place.seed == 0 and place.number > 0 else 1), loss.stats)

    monkeypatch.setattr(ImprovedConsistencyTraining, "__call__", spoiled)
    config = tiny_config(training={"start": str(teacher), "steps": 15, "lr": 1e-12, "save_every": 100})
    started = run(config, tmp_path / "started", device="cpu", console=console)
    assert "Going back to the start" in console.file.getvalue()
    ours, theirs = load(started).model.state_dict(), load(teacher).model.state_dict()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


def test_the_command_line_knows_a_diffusion_model(tmp_path):
    path = diffusion_file(tmp_path)
    said = CliRunner().invoke(app, ["info", str(path)]).output
    assert "diffusion" in said and "18 of Heun's method" in said and "two steps" not in said
    drawn = CliRunner().invoke(app, ["sample", str(path), "-n", "2", "--out", str(tmp_path / "two.png")])
    assert drawn.exit_code == 0 and (tmp_path / "two.png").is_file()
    tuned = CliRunner().invoke(app, ["tune", str(path), "--data", "digits", "--samples", "100", "--first", "100"])
    assert isinstance(tuned.exception, ConfigError) and "consistency models" in str(tuned.exception)
