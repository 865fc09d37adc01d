"""MeanFlow: its identity, its times, its model, and the whole way of one."""

import io
import math

import pytest
import torch
from helpers import step_of, tiny_config
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

from ict.cli import app
from ict.config import NoiseConfig
from ict.experiment import run
from ict.model import AverageVelocity, ModelSpec, build_model, flow_time
from ict.objectives import build_objective
from ict.objectives.tangent import derivative
from ict.reading import ConfigError
from ict.sampling import load

NOISE = NoiseConfig()
SECTIONS = {"objective": {"kind": "meanflow", "p_mean": -2.0, "p_std": 2.0}, "net": {"intervals": True}}


class Formula(nn.Module):
    """A net that answers with a formula of z, t and r, times one parameter."""

    def __init__(self, formula) -> None:
        super().__init__()
        self.formula, self.weight = formula, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        t, gap = (each.double().reshape(-1, 1, 1, 1) for each in c_noise.unbind(1))
        return self.weight * self.formula(x, t, t - gap)


def flow(formula) -> AverageVelocity:
    return AverageVelocity(Formula(formula), NOISE, image_shape=(1, 8, 8), kind="meanflow")


def spread_of(t: Tensor, s: float = 0.5) -> Tensor:
    """The deviation of z at a time, for data ~ N(0, s²)."""
    return torch.sqrt((1 - t) ** 2 * s**2 + t**2)


def gaussian(z: Tensor, t: Tensor, r: Tensor) -> Tensor:
    """The exact average velocity for data ~ N(0, ½²): the flow scales z with its deviation."""
    return z * (1 - spread_of(r) / spread_of(t)) / (t - r)


def test_the_identity_holds_for_the_exact_average_velocity():
    """u = v − (t − r) du/dt along the flow's own velocity, in float64 and far from r = t."""
    t, r = torch.tensor([0.3, 0.6, 0.95]).double(), torch.tensor([0.0, 0.2, 0.05]).double()
    z, model = torch.randn(3, 1, 8, 8).double(), flow(gaussian)
    at = t.clone().requires_grad_()
    (rate,) = torch.autograd.grad(spread_of(at).log().sum(), at)
    v = rate.reshape(-1, 1, 1, 1) * z
    value, slope = derivative(lambda z, t: model.velocity(z, t, r, None, None), (z, t), (v, torch.ones_like(t)))
    assert torch.allclose(value, v - (t - r).reshape(-1, 1, 1, 1) * slope, atol=1e-5)


def test_the_exact_model_draws_the_right_images_in_one_step_and_is_a_consistency_function():
    model, z = flow(gaussian), torch.randn(4096, 1, 8, 8).double()
    sigma = torch.full((4096,), 80.0, dtype=torch.float64)
    assert model(80 * z, sigma).std().item() == pytest.approx(0.5, rel=0.02)
    low = torch.full((4096,), 0.7, dtype=torch.float64)
    x = torch.randn(4096, 1, 8, 8).double()
    along = x * math.sqrt((0.25 + 0.7**2) / (0.25 + 80**2))  # where the flow carries x from 80 to 0.7
    assert torch.allclose(model(x, sigma), model(along, low), rtol=1e-4, atol=1e-6)


def test_one_image_has_straight_flows_and_no_loss():
    image = torch.rand(1, 1, 8, 8).double() - 0.5
    model, images = flow(lambda z, t, r: (z - image) / t), image.expand(32, -1, -1, -1)
    loss = build_objective(tiny_config(**SECTIONS))(model, images, None, step_of(32))
    # Times reach the net in float32, and at the lowest levels (z − x) / t divides by 0.002.
    assert loss.per_sample.max() < 1e-2 and loss.per_sample.median() < 1e-5


@pytest.mark.parametrize("power", [None, 0.0])
def test_loss_and_gradient_are_those_of_the_formula(power):
    config = tiny_config(
        **{**SECTIONS, "objective": SECTIONS["objective"] | ({} if power is None else {"power": power})}
    )
    model, images, step = flow(lambda z, t, r: z * (t + 2 * r) + t), torch.rand(64, 1, 8, 8).double(), step_of(64)
    ours = build_objective(config)
    loss = ours(model, images, None, step)
    (found,) = torch.autograd.grad(loss.per_sample.mean(), model.net.weight)
    low, high = ours.draw_levels(step)
    t, r, e = *(flow_time(s).reshape(-1, 1, 1, 1) for s in (high, low)), step.noise(images, step.samples).double()
    z, v = (1 - t) * images + t * e, e - images
    slope = v * (t + 2 * r) + z + 1
    squared = (model.net.weight * (z * (t + 2 * r) + t) - (v - (t - r) * slope)).square().sum((1, 2, 3))
    weight = (squared.detach() + 1e-3) ** -(0.75 if power is None else power)
    (expected,) = torch.autograd.grad((weight * squared).mean(), model.net.weight)
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    assert torch.allclose(loss.per_sample.detach(), (squared.detach() / 64).sqrt(), rtol=1e-4)


def test_times_are_drawn_as_in_the_paper():
    config = tiny_config(**{**SECTIONS, "objective": SECTIONS["objective"] | {"apart": 0.25}})
    low, high = build_objective(config).draw_levels(step_of(20_000))
    assert (low <= high).all() and (low < high).double().mean().item() == pytest.approx(0.25, abs=0.01)
    one = torch.exp(-2 + 2 * torch.randn(20_000, 2).double()).clamp(0.002, 80).amax(1)
    for share in (0.1, 0.5, 0.9):
        assert high.quantile(share).log().item() == pytest.approx(one.quantile(share).log().item(), abs=0.08)
    assert flow_time(torch.tensor(80.0)).item() == pytest.approx(80 / 81)


def test_the_net_is_told_both_times():
    spec = ModelSpec.from_config(tiny_config(**SECTIONS), tuple("0123456789"))
    model = build_model(spec).eval()
    nn.init.normal_(model.net.conv_out.weight, std=0.1)
    for block in (module for module in model.net.modules() if hasattr(module, "conv2")):
        nn.init.normal_(block.conv2.weight, std=0.1)
    x, sigma, labels = torch.randn(2, 1, 8, 8), torch.full((2,), 3.0), torch.arange(2)
    answers = [model(x, sigma, labels, to=torch.full((2,), low)) for low in (0.0, 1.0, 3.0)]
    assert not torch.allclose(answers[0], answers[1]) and not torch.allclose(answers[1], answers[2])
    t = flow_time(sigma).reshape(-1, 1, 1, 1)
    assert torch.allclose(model(x, sigma, labels), (1 - t) * x - t * answers[0], atol=1e-6)
    plain = build_model(ModelSpec.from_config(tiny_config(), tuple("0123456789"))).state_dict()
    assert model.state_dict().keys() - plain.keys() == {"net.embed.interval.weight"}


def test_the_whole_way_of_one(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    path = run(tiny_config(**SECTIONS), tmp_path / "run", device="cpu", console=console)
    assert load(path).spec.kind == "meanflow"
    one, two = (load(path).sample(4, steps=steps) for steps in (1, 2))
    assert one.isfinite().all() and not torch.equal(one, two)
    said = CliRunner().invoke(app, ["info", str(path)]).output
    assert "meanflow" in said and "two steps" in said
    drawn = CliRunner().invoke(app, ["sample", str(path), "-n", "2", "--out", str(tmp_path / "two.png")])
    assert drawn.exit_code == 0 and (tmp_path / "two.png").is_file()
    scored = CliRunner().invoke(app, ["eval", str(tmp_path / "run"), "--samples", "100"])
    assert scored.exit_code == 0, scored.output
    diffusion = run(tiny_config(objective={"kind": "edm"}), tmp_path / "edm", device="cpu", console=console)
    with pytest.raises(ConfigError, match="its net is not the recipe's"):
        run(tiny_config(**SECTIONS, training={"start": str(diffusion)}), tmp_path / "b", device="cpu", console=console)


def test_the_two_keys_belong_together():
    with pytest.raises(ConfigError, match=r"set net\.intervals = true"):
        tiny_config(objective={"kind": "meanflow"})
    with pytest.raises(ConfigError, match=r"net\.intervals is for objective\.kind = meanflow alone"):
        tiny_config(net={"intervals": True})
    with pytest.raises(ConfigError, match="belong together"):
        ModelSpec(image_size=8, channels=1, kind="meanflow", net=tiny_config().net)
