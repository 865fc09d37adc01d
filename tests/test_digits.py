"""The default recipe and every other method, trained for real and judged: `make test-slow`."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console

from ict.data import load_images, to_uint8
from ict.evaluation.report import nearest
from ict.experiment import run
from ict.recipes import find_recipe, load_recipe
from ict.sampling import Generator, load
from ict.training.log import TrainingFailed

pytestmark = pytest.mark.slow
SAMPLES = 500


@pytest.fixture(scope="module", autouse=True)
def _both_cores():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def judge():
    """A classifier fitted to the real digits, first shown to know digits that it has not seen."""
    from sklearn.neural_network import MLPClassifier

    images = load_images(load_recipe(find_recipe("digits")).data)
    x, y = images.pixels.flatten(1).numpy() / 255, images.labels.numpy()
    half = MLPClassifier((128,), alpha=1e-2, max_iter=400, random_state=0).fit(x[::2], y[::2])
    assert half.score(x[1::2], y[1::2]) > 0.95
    assert half.predict_proba(x[1::2]).max(axis=1).mean() > 0.9
    return MLPClassifier((128,), alpha=1e-2, max_iter=400, random_state=0).fit(x, y)


def verdict(judge, images: torch.Tensor) -> np.ndarray:
    return judge.predict_proba(to_uint8(images).flatten(1).numpy() / 255)


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


# --- every method, in half a minute or so of one core each, on a net of half the width

CONTINUOUS = ["objective.kind=continuous", "objective.distance=squared_l2", "training.lr_warmup=0.1"]
METHODS = {
    "ict": ["training.steps=300"],
    "ect": ["objective.kind=ect", "objective.c=0.01", "objective.stages=4", "training.steps=400"],
    "edm": ["objective.kind=edm", "objective.p_mean=-1.2", "objective.p_std=1.2", "training.steps=400"],
    "continuous": [*CONTINUOUS, "training.steps=300"],
    "sct": ["objective.kind=sct", "objective.p_mean=-1.0", "objective.p_std=1.4", "training.steps=300"],
    "meanflow": ["objective.kind=meanflow", "net.intervals=true", "objective.p_mean=-1.0", "training.steps=200"],
}


def trained_by(changes: list[str], folder) -> Generator:
    quick = ["net.channels=16", "training.snapshots=0", "training.save_every=100000", "training.rollbacks=0"]
    config = load_recipe(find_recipe("digits"), [*quick, *changes])
    run(config, folder, device="cpu", console=Console(file=io.StringIO()))
    return load(folder)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_draws_digits_that_can_be_read(method, judge, tmp_path):
    generator = trained_by(METHODS[method], tmp_path / "run")
    labels = [i % 10 for i in range(SAMPLES)]
    found = verdict(judge, generator.sample(SAMPLES, seed=2, label=labels))
    right = np.mean(found.argmax(axis=1) == labels)
    print(f"{method}: confidence {found.max(axis=1).mean():.3f}, of the asked class {right:.1%}")
    assert found.max(axis=1).mean() >= 0.8 and right >= 0.7


def test_a_sensitive_embedding_diverges_in_continuous_time(tmp_path):
    """§3.1, Fig. 1b: the same run as above, but for a Fourier scale of 16 in place of 0.02."""
    with pytest.raises(TrainingFailed, match="diverged"):
        trained_by([*CONTINUOUS, "training.steps=300", "net.fourier_scale=16"], tmp_path / "run")
