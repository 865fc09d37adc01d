"""A run that begins as diffusion: what it minimises when, what it says, and that nothing before the switch lasts."""

import io
from dataclasses import replace

import pytest
import torch
from helpers import check_resume, check_step, step_of, tiny_config
from rich.console import Console

from ict.experiment import run
from ict.model import ModelSpec, build_model
from ict.objectives import OBJECTIVES, build_objective
from ict.objectives.edm import Diffusion
from ict.ranks import ALONE
from ict.reading import ConfigError
from ict.training.budget import Budget
from ict.training.guard import FAR, PATIENCE, SETTLED, Guard
from ict.training.plan import Plan

KINDS = {"ict": {}, "ect": {}, "sct": {"warmup": 0.9}, "continuous": {"distance": "squared_l2"}}


def config_of(kind: str, denoise: float = 0.3, **objective):
    return tiny_config(objective={"kind": kind, "denoise": denoise, "s0": 2, "s1": 8, **KINDS[kind], **objective})


@pytest.mark.parametrize("kind", KINDS)
def test_it_denoises_first_and_then_the_method_has_a_run_of_its_own(kind):
    config = config_of(kind)
    objective, plain = build_objective(config), OBJECTIVES[kind](config)
    model = build_model(ModelSpec.from_config(config, tuple("0123456789"))).train()
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
    images, labels = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)) - 0.5, torch.arange(6)

    def loss(method, done, total):
        return method(model, images, labels, step_of(6, done=done, total=total)).per_sample

    for done in (0, 29):
        assert torch.equal(loss(objective, done, 100), loss(Diffusion(config), 0, 1))  # of a model of this kind
        assert objective.phase(step_of(6, done=done)).kind == "denoising"
    for done in (30, 60, 99):
        assert torch.equal(loss(objective, done, 100), loss(plain, done - 30, 70))
        found, expected = objective.phase(step_of(6, done=done)), plain.phase(step_of(6, done=done - 30, total=70))
        assert found.kind == "" and found.figures == expected.figures


def test_a_method_without_phases_can_be_warmed_up(monkeypatch):
    class Plain(OBJECTIVES["ict"]):
        phase = property()  # hasattr is false

    monkeypatch.setitem(OBJECTIVES, "plain", Plain)
    objective = build_objective(tiny_config(objective={"kind": "plain", "denoise": 0.3}))
    assert objective.phase(step_of(2, done=0)).kind == "denoising" and objective.phase(step_of(2, done=50)) is None


@pytest.mark.parametrize("wrong", [{"kind": "edm"}, {"kind": "meanflow"}, {"teacher": "ema"}])
def test_where_it_makes_no_sense_it_is_refused(wrong):
    net = {"intervals": wrong.get("kind") == "meanflow"}
    with pytest.raises(ConfigError, match=r"objective\.denoise is for consistency models that teach themselves"):
        tiny_config(objective={"denoise": 0.3, **wrong}, net=net)
    for share in (-0.1, 1.0):
        with pytest.raises(ConfigError, match="a share of the run"):
            tiny_config(objective={"denoise": share})


def test_the_guard_knows_nothing_usual_after_the_switch():
    """A denoising loss is a thousand times the other, or a thousandth: neither is a divergence."""
    for kinds in (("denoising", ""), ("", "")):
        guard = Guard(tiny_config(), ALONE, torch.device("cpu"))
        for kind, value in zip(kinds, (1.0, 100 * FAR), strict=True):
            for _ in range(2 * SETTLED + PATIENCE):
                guard.begin()
                check_step(guard, value, value, step=0, levels=0, kind=kind)
        assert (guard.alarm is None) == (kinds[0] != kinds[1])
        if kinds[0]:
            assert guard.state.smooth == pytest.approx(100 * FAR)


def test_the_scale_of_fp16_is_sought_anew_after_the_switch():
    guard = Guard(tiny_config(), ALONE, torch.device("cpu"))
    first = guard.state.scale
    for kind in ("denoising", "denoising", "denoising", ""):
        guard.begin()
        finite = kind == ""
        gradient = 1.0 if finite else float("inf")
        check_step(guard, 1.0, gradient, step=0, levels=0, scaled=True, kind=kind)
        assert (guard.state.scale == first) == finite


def test_the_plan_tells_of_it():
    plan = Plan.of(config_of("ict", 0.25, s0=10, s1=80), Budget(steps=4000))
    assert plan.describe() == (
        "denoising, drawn from all of them; from step 1,000 on "
        "N = 11 → 21 (step 1,750) → 41 (step 2,500) → 81 (step 3,250)"
    )
    assert plan.warning() is None and Plan.of(config_of("ict", 0.95, s0=10, s1=80), Budget(steps=4000)).warning()
    assert "from 15 s on drawn from all" in Plan.of(config_of("ect", 0.25), Budget(seconds=60)).describe()


def test_it_never_takes_the_whole_run():
    config = config_of("ict", denoise=0.95, s0=8)
    assert Plan.of(config, Budget(steps=10)).first == 9 and Plan.of(config, Budget(steps=1)).first == 0
    assert "only about 1 steps follow the denoising" in Plan.of(config, Budget(steps=10)).warning()


def test_a_run_switches_and_resumes_to_the_bit(tmp_path):
    check_resume(config_of("ict", 0.5), tmp_path)  # 6 of 12 steps; checkpoints at 4, 8 and 12


def test_it_denoises_only_levels_that_the_model_is_made_for():
    """Below σ_min a consistency model's c_out changes its sign, and the weight goes to infinity."""
    config = tiny_config(
        objective={"denoise": 0.5, "p_mean": -4.0, "p_std": 3.0}, noise={"sigma_max": 1.0}, data={"classes": 0}
    )
    model = build_model(ModelSpec.from_config(config, ()))
    loss = build_objective(config)(model, torch.zeros(200, 1, 8, 8), None, step_of(200))
    assert loss.sigma.min() > config.noise.sigma_min and loss.sigma.max() == config.noise.sigma_max
    assert (loss.sigma == loss.sigma.min()).sum() > 10
    plain = tiny_config(objective={"kind": "edm", "p_mean": -4.0, "p_std": 3.0}, data={"classes": 0})
    model = build_model(ModelSpec.from_config(plain, ()))
    loss = build_objective(plain)(model, torch.zeros(200, 1, 8, 8), None, step_of(200))
    assert loss.sigma.min() < config.noise.sigma_min  # a diffusion model has no lowest one


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_what_follows_is_rehearsed_too(share, tmp_path):
    config = tiny_config(objective={"denoise": share, "p_mean": 1000.0, "p_std": 0.1})
    with pytest.raises(ConfigError, match="cannot be trained"):
        run(config, tmp_path / "run", device="cpu", console=Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()


def test_a_longer_run_that_denoises_again_says_so(tmp_path):
    config = config_of("ict", 0.5)
    run(config, tmp_path / "run", device="cpu", console=Console(file=io.StringIO()))
    said = Console(file=io.StringIO(), width=300)
    longer = replace(config, training=replace(config.training, steps=40))
    run(longer, tmp_path / "run", device="cpu", resume=True, console=said)
    assert "denoises again until step 20" in said.file.getvalue()
