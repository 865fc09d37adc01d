"""The four runs of the paper, number by number (Table 1, §3 and appendix B), and those of other papers."""

import pytest

from ict.cost import measure
from ict.distance import huber_c
from ict.model import ModelSpec
from ict.objectives import build_objective
from ict.recipes import find_recipe, load_recipe

COMMON = {
    "noise.sigma_min": 0.002, "noise.sigma_max": 80.0, "noise.rho": 7.0, "noise.sigma_data": 0.5,
    "objective.kind": "ict", "objective.curriculum": "exponential", "objective.s0": 10, "objective.s1": 1280,
    "objective.index": "lognormal", "objective.p_mean": -1.1, "objective.p_std": 2.0,
    "objective.weighting": "inverse_gap", "objective.distance": "pseudo_huber", "objective.c": None,
    "training.lr": 1e-4, "training.lr_schedule": "constant", "training.lr_warmup": 0.0,
    "training.betas": (0.9, 0.999), "training.eps": 1e-8, "training.ema_ramp": 0.0, "data.flip": True,
    "data.channels": 3,
}  # fmt: skip
CIFAR10 = {
    "data.source": "cifar10", "data.image_size": 32, "data.classes": 0, "net.kind": "ncsnpp", "net.channels": 128,
    "net.multipliers": (2, 2, 2), "net.attention": (16,), "net.head_channels": 0, "net.dropout": 0.3,
    "net.dropout_max_size": None, "net.embedding": "fourier", "net.fourier_scale": 0.02, "training.steps": 400_000,
    "training.batch": 1024, "training.ema": (0.99993,),
}  # fmt: skip
IMAGENET64 = {
    "data.source": "imagenet64", "data.image_size": 64, "data.classes": 1000, "net.kind": "adm", "net.channels": 192,
    "net.multipliers": (1, 2, 3, 4), "net.attention": (32, 16, 8), "net.head_channels": 64, "net.dropout": 0.2,
    "net.dropout_max_size": 16, "net.embedding": "positional", "net.positional_scale": 1000.0,
    "net.scale_shift": False, "training.steps": 800_000, "training.batch": 4096, "training.ema": (0.99997,),
}  # fmt: skip
PAPER = {
    "cifar10-ict": CIFAR10 | {"net.blocks": 4, "sampling.sigma_mid": 0.821},
    "cifar10-ict-deep": CIFAR10 | {"net.blocks": 8, "sampling.sigma_mid": 0.661},
    "imagenet64-ict": IMAGENET64 | {"net.blocks": 3, "sampling.sigma_mid": 1.526},
    "imagenet64-ict-deep": IMAGENET64 | {"net.blocks": 6, "sampling.sigma_mid": 0.973},
}


# Of other papers and their published code, as the recipes say.
NCSNPP = {key: CIFAR10[key] for key in CIFAR10 if key.startswith(("data.", "net."))} | {"net.blocks": 4}
OTHERS = {
    "cifar10-edm": {
        "objective.kind": "edm", "objective.p_mean": -1.2, "objective.p_std": 1.2, "net.dropout": 0.13,
        "net.embedding": "sinusoidal", "training.steps": 200_000_000 // 512, "training.batch": 512, "training.lr": 1e-3,
        "training.lr_warmup": 10 / 200, "training.ema": (pytest.approx(0.5 ** (512 / 500_000), abs=1e-7),),
    },
    "cifar10-ect": {
        "objective.kind": "ect", "objective.p_mean": -1.1, "objective.p_std": 2.0, "objective.stages": 8,
        "objective.q": 2.0, "objective.k": 8.0, "objective.b": 1.0, "net.dropout": 0.2, "net.embedding": "sinusoidal",
        "training.steps": 25_600_000 // 128, "training.batch": 128, "training.lr": 1e-4, "training.betas": (0.9, 0.999),
        "training.ema": (0.9999,),
    },
    "cifar10-ct-continuous": {
        "objective.kind": "continuous", "objective.index": "uniform", "objective.distance": "squared_l2",
        "net.dropout": 0.3, "net.fourier_scale": 0.02, "training.steps": 800_000, "training.batch": 512,
        "training.lr_warmup": pytest.approx(10e6 / 512 / 800_000, abs=1e-4), "training.ema": (0.9999,),
    },
    "cifar10-sct": {
        "objective.kind": "sct", "objective.p_mean": -1.0, "objective.p_std": 1.4, "objective.power": None,
        "objective.warmup": 10_000 / 400_000, "net.dropout": 0.2, "net.embedding": "sinusoidal", "training.batch": 512,
        "training.lr": 1e-4,
    },
    "cifar10-meanflow": {
        "objective.kind": "meanflow", "objective.p_mean": -2.0, "objective.p_std": 2.0, "objective.apart": 0.75,
        "objective.power": 0.75, "net.dropout": 0.2, "net.intervals": True, "net.embedding": "sinusoidal",
        "training.steps": 800_000, "training.batch": 1024, "training.lr": 6e-4,
        "training.lr_warmup": 200 / 16_000, "training.betas": (0.9, 0.999), "training.ema": (0.99995, 0.9999, 0.9996),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [*PAPER, *OTHERS])
def test_every_number_is_the_papers(name):
    config = load_recipe(find_recipe(name))
    expected = COMMON | PAPER[name] if name in PAPER else NCSNPP | OTHERS[name]
    found = {}
    for key in expected:
        section, _, field = key.partition(".")
        found[key] = getattr(getattr(config, section), field)
    assert found == expected


@pytest.mark.parametrize("name", OTHERS)
def test_recipes_of_other_methods_can_be_built(name):
    """The objective takes its keys, and the net has about the size of the papers'."""
    config = load_recipe(find_recipe(name))
    build_objective(config)
    assert 55e6 < measure(ModelSpec.from_config(config, ())).parameters < 57e6


@pytest.mark.parametrize(("name", "c"), [("cifar10-ict", 0.0299), ("imagenet64-ict", 0.0599)])
def test_c_follows_from_the_size(name, c):
    data = load_recipe(find_recipe(name)).data
    assert huber_c(data.channels * data.image_size**2) == pytest.approx(c, abs=6e-5)
