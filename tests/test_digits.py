"""The default recipe, trained for real and judged: `make test-slow`."""

import io

import numpy as np
import pytest
import torch
from helpers import fit_judge, verdict
from rich.console import Console

from ict.data import load_images
from ict.evaluation.report import nearest
from ict.experiment import run
from ict.pixels import to_uint8
from ict.recipes import find_recipe, load_recipe
from ict.sampling import Generator, load

pytestmark = pytest.mark.slow
SAMPLES = 500


@pytest.fixture(scope="module")
def judge():
    return fit_judge()


def trained(classes: int, folder) -> Generator:
    config = load_recipe(find_recipe("digits"), [f"data.classes={classes}"])
    run(config, folder, device="cpu", console=Console(file=io.StringIO()))
    return load(folder)


@pytest.fixture(scope="module", params=[10, 0], ids=["by class", "unconditional"])
def generator(request, tmp_path_factory) -> Generator:
    return trained(request.param, tmp_path_factory.mktemp("digits") / "run")


def test_one_step_digits_are_read_by_the_judge(generator, judge):
    found = verdict(judge, generator.sample(SAMPLES, seed=1))
    shares = np.bincount(found.argmax(axis=1), minlength=10) / SAMPLES
    print(f"confidence {found.max(axis=1).mean():.3f}, rarest digit {shares.min():.1%}")
    assert found.max(axis=1).mean() >= 0.85
    assert shares.min() >= 0.03
    if generator.spec.class_names:
        labels = [i % 10 for i in range(SAMPLES)]
        asked = verdict(judge, generator.sample(SAMPLES, seed=2, label=labels)).argmax(axis=1)
        print(f"of the asked class {np.mean(asked == labels):.1%}")
        assert np.mean(asked == labels) >= 0.95


def test_two_steps_are_at_least_as_good(generator, judge):
    one, two = (verdict(judge, generator.sample(SAMPLES, steps=s, seed=1)).max(axis=1).mean() for s in (1, 2))
    print(f"confidence in one step {one:.3f}, in two {two:.3f}")
    assert two > one - 0.01


def test_samples_are_not_copies(generator):
    """The distance to the nearest training image is like that between real images: not near 0, not far off."""
    images = load_images(load_recipe(find_recipe("digits")).data)
    _, made = nearest(to_uint8(generator.sample(SAMPLES, seed=1)), images)
    a = images.pixels.flatten(1).float() / 127.5
    real = torch.cdist(a, a).fill_diagonal_(float("inf")).min(dim=1).values
    print(f"median distance to the nearest: samples {made.median():.2f}, real images {real.median():.2f}")
    assert 0.8 * real.median() < made.median() < 1.5 * real.median()
    assert (made < 0.25 * real.median()).float().mean() < 0.01
