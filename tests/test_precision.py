"""What the trunk computes in, and that nothing around it does."""

import pytest
import torch
from helpers import check_step, tiny_config
from torch import nn

from ict.config import Config
from ict.data import load_images
from ict.model import ModelSpec, build_model
from ict.nets.layers import ResidualBlock
from ict.nets.unet import Embedding
from ict.noise import karras_sigmas
from ict.precision import SAFE, exact, full_precision, pick_precision
from ict.ranks import ALONE
from ict.reading import ConfigError, from_dict
from ict.sampling import Generator
from ict.training.budget import Budget
from ict.training.guard import BEYOND, Guard, GuardState
from ict.training.loop import new_state, train

CPU = torch.device("cpu")


def model_of(kind: str):
    config = tiny_config(net={"kind": kind, "dropout": 0.1})
    model = build_model(ModelSpec.from_config(config, tuple("0123456789"))).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["unet", "ncsnpp", "adm"])
def test_only_the_trunk_is_in_half_precision(kind, precision):
    """The embedding's projection in each block is not: it would round away what tells neighbouring levels apart."""
    model, seen = model_of(kind), {}
    model.precision = precision

    def note(name):
        return lambda _module, _inputs, out: seen.setdefault(name, set()).add(out.dtype)

    for module in model.modules():
        if isinstance(module, Embedding):
            module.register_forward_hook(note("embedding"))
        if isinstance(module, ResidualBlock):
            module.embed.register_forward_hook(note("projection"))
            module.register_forward_hook(note("block"))
    x, sigma = torch.randn(4, 1, 8, 8), torch.tensor([0.01, 0.5, 5.0, 80.0], dtype=torch.float64)
    out = model(x, sigma, torch.arange(4), torch.arange(4))
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    assert seen == {"embedding": {torch.float32}, "projection": {torch.float32}, "block": {half}}
    assert out.dtype == torch.float32
    with full_precision():
        exact = model(x, sigma, torch.arange(4), torch.arange(4))
    model.precision = "float32"
    assert torch.equal(exact, model(x, sigma, torch.arange(4), torch.arange(4)))
    error = (out - exact).norm() / exact.norm()
    assert 0 < error < {"fp16": 5e-3, "bf16": 4e-2}[precision]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_identity_at_sigma_min_is_exact_in_any_precision(precision):
    model, x = model_of("unet"), torch.randn(3, 1, 8, 8)
    model.precision = precision
    sigma = torch.full((3,), 0.002, dtype=torch.float64)
    assert torch.equal(model(x, sigma, torch.arange(3), torch.arange(3)), x)


def test_neighbouring_levels_stay_apart():
    """At N = 1281 a block is told them as if all were float32; a projection in bf16 would not tell them apart."""
    model = model_of("ncsnpp")
    embed = next(m for m in model.modules() if isinstance(m, Embedding))
    block = next(m for m in model.modules() if isinstance(m, ResidualBlock))
    c_noise = 0.25 * karras_sigmas(1281)[[100, 101, 900, 901, 1279, 1280]].log().float()
    label, found = torch.zeros(6, dtype=torch.long), []
    rows = block.embed(embed(c_noise, label))
    with torch.autocast("cpu", torch.bfloat16):
        told = embed(c_noise, label)
        found.append(block.embed(told).float())
        with exact(told):
            found.append(block.embed(told))
    assert torch.equal(found[1], rows)
    for low in (0, 2, 4):
        gap, rounded = rows[low + 1] - rows[low], found[0][low + 1] - found[0][low]
        assert gap.norm() > 0 and (rounded - gap).norm() > 0.5 * gap.norm()


def test_auto_follows_the_table(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda = torch.device("cuda")
    assert pick_precision("auto", cuda, levels=11) == pick_precision("auto", cuda, levels=1281) == "fp16"
    assert pick_precision("auto", cuda, levels=SAFE["fp16"] + 1) == "tf32"
    assert pick_precision("auto", cuda) == "fp16" and pick_precision("auto", CPU, levels=11) == "float32"
    assert pick_precision("bf16", CPU) == "bf16"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert pick_precision("auto", cuda, levels=11) == "tf32"


def test_unknown_precisions_are_refused():
    with pytest.raises(ConfigError, match=r"speed\.precision = 'half': use auto, float32"):
        from_dict(Config, {"speed": {"precision": "half"}})
    config = tiny_config()
    spec = ModelSpec.from_config(config, tuple("0123456789"))
    with pytest.raises(ConfigError, match="precision = 'fp61'"):
        Generator(build_model(spec), spec).to("cpu", precision="fp61")


def overflow(guard: Guard, *, loss: float = 1.0, gradient: float = float("inf")) -> bool:
    return check_step(guard, loss, gradient, step=0, levels=11, scaled=True)


def test_a_scale_that_is_too_high_is_halved_and_tried_again_later():
    guard = Guard(tiny_config(), ALONE, CPU)
    first = guard.state.scale
    assert not overflow(guard) and not overflow(guard)
    assert guard.state.scale == first / 4 and guard.state.skipped == 0 and guard.alarm is None
    for _ in range(1000):
        assert overflow(guard, gradient=1.0)
    assert guard.state.scale == first / 2


def test_without_a_scale_left_to_lower_it_is_a_fault_like_any_other():
    guard = Guard(tiny_config(), ALONE, CPU)
    guard.state.scale = 1.0
    assert not overflow(guard) and guard.state.skipped == 1


def test_a_trunk_whose_numbers_leave_the_range_of_fp16_leaves_it():
    """The loss itself is not finite: no scale of it can help."""
    guard = Guard(tiny_config(), ALONE, CPU)
    for number in range(BEYOND):
        assert not guard.state.left_half, number
        overflow(guard, loss=float("nan"))
    assert guard.state.left_half and guard.state.skipped == BEYOND and not guard.calm
    guard.forget(GuardState())
    assert guard.state.left_half  # also after a way back
    config, said = tiny_config(training={"steps": 3}), []
    state = new_state(config, build_model(ModelSpec.from_config(config, tuple("0123456789"))))
    for _ in train(config, state, load_images(config.data), Budget(steps=3), guard=guard, warn=said.append):
        pass
    assert state.model.precision == "tf32" and len(said) == 1 and "left the range of fp16" in said[0]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_run_in_half_precision_trains_like_one_in_float32(precision):
    losses = {}
    for name in ("float32", precision):
        config = tiny_config(training={"steps": 6}, speed={"precision": name})
        state = new_state(config, build_model(ModelSpec.from_config(config, tuple("0123456789"))))
        losses[name] = [s.loss.item() for s in train(config, state, load_images(config.data), Budget(steps=6))]
    for ours, truth in zip(losses[precision], losses["float32"], strict=True):
        assert abs(ours - truth) < 0.03 * truth


def test_a_model_that_left_fp16_is_not_sampled_in_it(monkeypatch):
    monkeypatch.setattr("ict.sampling.pick_precision", lambda asked, device: "fp16" if asked == "auto" else asked)
    config = tiny_config()
    spec = ModelSpec.from_config(config, tuple("0123456789"))
    for origin, precision in (({}, "fp16"), ({"precision": "tf32"}, "tf32"), ({"precision": ["?"]}, "fp16")):
        assert Generator(build_model(spec), spec, origin).to("cpu").model.precision == precision
    told = Generator(build_model(spec), spec, {"precision": "tf32"}).to("cpu", precision="bf16")
    assert told.model.precision == "bf16"
