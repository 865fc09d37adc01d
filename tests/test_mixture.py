"""The mixture in the plane: its formulas against each other, and the sampler, distillation and data against them."""

import io
import itertools
import math

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from ict import rng
from ict.cli import app
from ict.config import Config, DataConfig, NetConfig, NoiseConfig
from ict.data import load_images
from ict.evaluation.maps import follow, gaussian_noise, map_distance
from ict.experiment import run
from ict.mixture import MIXTURE, SHAPE, ExactDiffusion, Mixture
from ict.model import ModelSpec, build_model
from ict.nets.mlp import MLP
from ict.objectives import build_objective
from ict.pixels import to_float
from ict.reading import ConfigError, from_dict
from ict.recipes import find_recipe, load_recipe
from ict.rng import Stream
from ict.sampling import Generator, load, solve, trajectory

NOISE = NoiseConfig()


def noisy(count: int, sigma: float) -> torch.Tensor:
    points, _ = MIXTURE.draw(count, seed=3)
    return points.double() + sigma * rng.normal(torch.arange(count), SHAPE, seed=4, step=0).double()


def rms(difference: torch.Tensor) -> float:
    return difference.square().sum((1, 2, 3)).mean().sqrt().item()


@pytest.mark.parametrize("sigma", [0.01, 0.3, 5.0])
def test_the_denoiser_is_tweedies_formula(sigma):
    """D = x + σ² ∇ ln p(x; σ), with the gradient by automatic differentiation."""
    x = noisy(200, sigma).requires_grad_()
    level = torch.full((200,), sigma, dtype=torch.float64)
    (score,) = torch.autograd.grad(MIXTURE.log_density(x, level).sum(), x)
    assert torch.allclose(MIXTURE.denoise(x, level), x + sigma**2 * score, atol=1e-10)


def test_the_density_has_mass_one():
    steps = torch.linspace(-3, 3, 301, dtype=torch.float64)
    x = torch.cartesian_prod(steps, steps).reshape(-1, *SHAPE)
    density = MIXTURE.log_density(x, torch.full((len(x),), 0.2, dtype=torch.float64)).exp()
    assert density.sum().item() * 0.02**2 == pytest.approx(1, abs=1e-6)


def test_the_consistency_function_of_one_gaussian_is_the_formula():
    one = Mixture(weights=(1.0,), means=((0.3, -0.2),), deviations=(0.4,))
    mean = torch.tensor([0.3, -0.2], dtype=torch.float64).reshape(SHAPE)
    x = mean + 2 * torch.randn(50, *SHAPE, dtype=torch.float64)
    shrink = math.sqrt((0.4**2 + 0.002**2) / (0.4**2 + 2.0**2))
    assert torch.allclose(one.consistency(x, 2.0, sigma_min=0.002), mean + shrink * (x - mean), atol=1e-7)


def test_the_consistency_function_is_one_along_a_trajectory_and_fine_enough():
    x = noisy(500, 80.0)
    half_way = MIXTURE.consistency(x, 80.0, sigma_min=0.4, steps=400)
    whole, second = MIXTURE.consistency(x, 80.0, sigma_min=0.002), MIXTURE.consistency(half_way, 0.4, sigma_min=0.002)
    assert (whole - second).abs().max() < 1e-6
    errors = [rms(MIXTURE.consistency(x, 80.0, sigma_min=0.002, steps=n) - whole) for n in (40, 80)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(4, abs=0.7)  # fourth order


def test_the_exact_map_makes_the_mixture_out_of_noise():
    z = rng.normal(torch.arange(20_000), SHAPE, seed=9, step=0)
    ends = MIXTURE.consistency(80 * z, 80.0, sigma_min=0.002, steps=60)
    drawn, parts = MIXTURE.draw(20_000, seed=5)
    means = torch.tensor(MIXTURE.means).double().reshape(1, -1, 2)
    nearest = lambda x: torch.cdist(x.double().reshape(1, -1, 2), means)[0].argmin(1).bincount(minlength=4) / len(x)  # noqa: E731
    assert torch.allclose(nearest(ends), nearest(drawn), atol=0.012)
    assert torch.allclose(ends.mean(0), drawn.double().mean(0), atol=0.012)
    assert torch.allclose(ends.flatten(1).T.cov(), drawn.double().flatten(1).T.cov(), atol=0.004)
    assert torch.allclose(parts.bincount() / len(parts), torch.tensor(MIXTURE.weights), atol=0.012)


def test_the_sampler_of_diffusion_reaches_the_exact_mixture():
    """Heun's method on the exact denoiser: the error falls with the square of the steps, to a few ten-thousandths."""
    numbers = torch.arange(500)
    z = rng.normal(numbers, SHAPE, seed=0, step=0, stream=Stream.SAMPLING)
    exact = MIXTURE.consistency(80 * z, 80.0, sigma_min=0.002)
    errors = [
        rms(solve(ExactDiffusion(), numbers, sigmas=trajectory(n, NOISE), seed=0, labels=None, clip=False) - exact)
        for n in (18, 50, 100, 200)
    ]
    assert errors[0] < 0.04 and errors[-1] < 3e-4
    assert all(math.log2(coarse / fine) > 1.7 for coarse, fine in itertools.pairwise(errors[1:]))


def test_the_set_is_the_mixture_rounded():
    images = load_images(DataConfig(source="mixture2d", image_size=1, channels=2))
    points, parts = MIXTURE.draw(len(images), seed=2023)
    inside = points.abs().flatten(1).amax(1) <= 1
    assert inside.double().mean() > 0.9995 and torch.equal(parts, images.labels)
    assert (to_float(images.pixels) - points)[inside].abs().max() <= 1 / 255 + 1e-6
    assert images.describe() == "two numbers, points of the plane"
    with pytest.raises(ConfigError, match=r"data\.image_size = 1 and data\.channels = 2"):
        load_images(DataConfig(source="mixture2d", image_size=8, channels=1))
    with pytest.raises(ConfigError, match=r"data\.channels = 2"):
        DataConfig(image_size=8, channels=2)


def test_a_net_of_dense_layers():
    config = NetConfig(kind="mlp", channels=8, multipliers=(1, 2), blocks=2, dropout=0.5)
    net = MLP(config, image_size=1, channels=2, classes=3).train()
    x, label, key = torch.randn(5, *SHAPE), torch.tensor([0, 1, 2, 0, 1]), torch.arange(5)
    assert torch.equal(net(x, torch.zeros(5), label, key), torch.zeros(5, *SHAPE))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    answer = net(x, torch.zeros(5), label, key)
    assert torch.equal(answer, net(x, torch.zeros(5), label, key))
    assert not torch.equal(answer, net(x, torch.zeros(5), label, key + 1))
    assert torch.allclose(answer[:2], net(x[:2], torch.zeros(2), label[:2], key[:2]), atol=1e-6)
    with pytest.raises(ConfigError, match="is for points"):
        MLP(config, image_size=8, channels=1, classes=0)


def test_distillation_by_name_of_the_exact_denoiser():
    """The lower side lies on the exact trajectory: what the ODE makes of the upper side."""
    section = {"kind": "cd", "teacher_model": "mixture2d", "curriculum": "constant", "s0": 160, "s1": 160}
    data = {"source": "mixture2d", "image_size": 1, "channels": 2}
    objective = build_objective(from_dict(Config, {"data": data, "objective": section}))
    x, high, low = noisy(64, 0.5), torch.full((64,), 0.5).double(), torch.full((64,), 0.47).double()
    lower = objective.lower_side(x, None, x, low, high, x)
    assert rms(lower - MIXTURE.consistency(x, 0.5, sigma_min=0.47)) < 2e-4


def test_the_distance_of_maps():
    """Of a model that answers with a constant, it is what the mixture's second moment makes it."""
    spec = ModelSpec(image_size=1, channels=2, net=NetConfig(kind="mlp", channels=8))
    generator = Generator(build_model(spec), spec)  # starts as F = 0: all noise lands at c_skip x, which is nearly 0
    points, _ = MIXTURE.draw(200_000, seed=6)
    assert map_distance(generator) == pytest.approx(rms(points), rel=0.03)
    ends = follow(generator, gaussian_noise(100))
    assert ends.exact.shape == ends.learned.shape == (100, 2)


def test_a_short_run_of_the_recipe(tmp_path):
    changes = ["training.steps=30", "training.batch=64", "training.snapshots=1", "objective.s1=20"]
    config = load_recipe(find_recipe("toy2d"), changes)
    run(config, tmp_path / "run", device="cpu", console=Console(file=io.StringIO(), width=200))
    page = (tmp_path / "run" / "report.html").read_text()
    assert "The learned map" in page and "Are they copies?" not in page and "enlarged" not in page
    assert (tmp_path / "run" / "map.png").read_bytes()[:4] == b"\x89PNG"
    assert len(list((tmp_path / "run" / "samples").iterdir())) == 1
    assert load(tmp_path / "run").sample(3).shape == (3, *SHAPE)


def test_points_by_component_diffusion_and_meanflow(tmp_path, monkeypatch):
    """With labels there is no one map to draw; diffusion is solved for its map, meanflow asked once."""
    monkeypatch.setattr("ict.evaluation.maps.GRID", 16)  # a coarser picture of it, sooner
    changes = ["training.steps=5", "training.batch=16", "training.snapshots=0", "objective.s1=10"]
    console = Console(file=io.StringIO(), width=200)
    kinds = {
        "labels": ["data.classes=4"],
        "edm": ["objective.kind=edm"],
        "meanflow": ["objective.kind=meanflow", "net.intervals=true"],
    }
    for name, keys in kinds.items():
        config = load_recipe(find_recipe("toy2d"), [*changes, *keys])
        run(config, tmp_path / name, device="cpu", console=console)
        page = (tmp_path / name / "report.html").read_text()
        assert ("The learned map" in page) == (name != "labels")
    drawn = CliRunner().invoke(app, ["sample", str(tmp_path / "edm"), "-n", "5", "--out", str(tmp_path / "five.png")])
    assert drawn.exit_code == 0 and (tmp_path / "five.png").is_file()
    scored = CliRunner().invoke(app, ["eval", str(tmp_path / "edm"), "--samples", "300", "--steps", "5"])
    assert scored.exit_code == 0 and "by the features of points" in scored.output
