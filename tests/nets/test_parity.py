"""Our NCSN++ and ADM against what the official implementations answer for the same weights and inputs.

The golden figures were made once by running openai/consistency_models_cifar10 (jax 0.10, flax 0.12) and
openai/consistency_models (torch 2.13, attention in float32) with the weights of formula.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from formula import numbers
from official import adm_modules, load_adm, load_ncsnpp

from ict.config import NetConfig
from ict.nets import build_net
from ict.recipes import find_recipe, load_recipe

GOLDEN = Path(__file__).parent / "golden"


def ncsnpp(size: int, **config) -> torch.nn.Module:
    config = {"channels": 32, "multipliers": (1, 2), "blocks": 1, "attention": (8,), **config}
    return build_net(NetConfig(kind="ncsnpp", head_channels=0, **config), image_size=size, channels=3, classes=0)


def adm(size: int, classes: int = 10, **config) -> torch.nn.Module:
    config = {"channels": 32, "multipliers": (1, 2), "blocks": 1, "attention": (8,), "head_channels": 16, **config}
    net = NetConfig(kind="adm", embedding="positional", **config)
    return build_net(net, image_size=size, channels=3, classes=classes)


def from_recipe(name: str) -> torch.nn.Module:
    config = load_recipe(find_recipe(name))
    size, classes = config.data.image_size, config.data.classes
    return build_net(config.net, image_size=size, channels=config.data.channels, classes=classes)


def distance(net: torch.nn.Module, golden: np.ndarray, *, labels: bool) -> float:
    """‖ours − theirs‖ / ‖theirs‖."""
    x, t = torch.from_numpy(numbers("x", golden.shape) * 1.7), torch.from_numpy(numbers("t", golden.shape[:1]))
    label = torch.arange(len(golden)) * 3 + 1 if labels else None
    with torch.no_grad():
        out = net.eval()(x, t, label)
    theirs = torch.from_numpy(golden)
    return ((out - theirs).norm() / theirs.norm()).item()


SMALL_NCSNPP = {
    "small": {},
    "small-deep": {"multipliers": (2, 2, 2), "blocks": 2},
    "scale16": {"fourier_scale": 16.0},
    "sinusoidal": {"embedding": "sinusoidal"},
}


@pytest.mark.parametrize("name", SMALL_NCSNPP)
def test_small_ncsnpp(name):
    net = ncsnpp(16, **SMALL_NCSNPP[name])
    load_ncsnpp(net, scale=net.config.fourier_scale)
    assert distance(net, np.load(GOLDEN / "ncsnpp.npz")[name], labels=False) < 1e-5


SMALL_ADM = {
    "small": {},
    "small-deep": {"multipliers": (1, 2, 2), "blocks": 2, "attention": (8, 4)},
    "scale-shift": {"scale_shift": True},
    "unconditional": {"classes": 0, "attention": (16, 8), "head_channels": 32},
}


@pytest.mark.parametrize("name", SMALL_ADM)
def test_small_adm(name):
    net = adm(16, **SMALL_ADM[name])
    load_adm(net)
    labels = SMALL_ADM[name].get("classes") != 0
    assert distance(net, np.load(GOLDEN / "adm.npz")[name], labels=labels) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "cifar10-deep", "score-sde"])
def test_full_ncsnpp(name):
    if name == "score-sde":
        net = ncsnpp(32, channels=128, multipliers=(1, 2, 2, 2), blocks=4, attention=(16,))
    else:
        net = from_recipe(name.replace("cifar10", "cifar10-ict"))
    load_ncsnpp(net, scale=0.02)
    assert distance(net, np.load(GOLDEN / "ncsnpp.npz")[name], labels=False) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["imagenet64", "imagenet64-deep"])
def test_full_adm(name):
    net = from_recipe(name.replace("imagenet64", "imagenet64-ict"))
    load_adm(net)
    assert distance(net, np.load(GOLDEN / "adm.npz")[name], labels=True) < 1e-5


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [  # as counted in the official nets, less the 128 frozen frequencies that flax counts as parameters
        ("cifar10-ict", 56_395_523),
        ("cifar10-ict-deep", 97_610_499),
        ("imagenet64-ict", 282_168_003),
        ("imagenet64-ict-deep", 472_767_555),
    ],
)
def test_parameter_counts(recipe, parameters):
    with torch.device("meta"):
        net = from_recipe(recipe)
    assert sum(p.numel() for p in net.parameters()) == parameters


def test_every_weight_of_adm_has_an_official_name():
    net = adm(16, multipliers=(1, 2, 2), attention=(8,))
    named = {id(p) for _, module in adm_modules(net) for p in module.parameters()}
    assert named == {id(p) for p in net.parameters()}
    assert len({name for name, _ in adm_modules(net)}) == len(list(adm_modules(net)))
