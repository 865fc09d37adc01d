"""The score of the whole training set: exact on small sets, the sample's own where that is certain, and no more."""

from dataclasses import replace

import pytest
import torch
from helpers import check_resume, same_weights, step_of, tiny_config, trained_weights

from ict.model import ModelSpec, build_model
from ict.objectives import OBJECTIVES, build_objective, score
from ict.objectives.score import DataScore, build_score, step_down
from ict.reading import ConfigError

CPU = torch.device("cpu")


def draws(count: int = 6, size: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pixels of a set, their classes, and noise for the first `count` of them."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (20, 1, size, size), generator=generator, dtype=torch.uint8)
    return pixels, torch.arange(20) % 3, torch.randn(count, 1, size, size, generator=generator)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("by_class", [False, True])
def test_it_is_the_posterior_mean(flip, by_class):
    """By hand in float64: every image, mirrored or not, with the density of the noise that it would need."""
    pixels, labels, z = draws()
    sigma = torch.tensor([0.5, 1.0, 2.0, 5.0, 20.0, 80.0], dtype=torch.float64)
    images = pixels.float() / 127.5 - 1
    noisy = images[:6] + sigma.float().reshape(-1, 1, 1, 1) * z
    found = DataScore(pixels, labels if by_class else None, CPU, flip=flip).noise(noisy, sigma, z, labels[:6])
    for one in range(6):
        x, s = noisy[one].double(), sigma[one]
        known = images[labels == labels[one]].double() if by_class else images.double()
        known = torch.cat((known, known.flip(-1))) if flip else known
        weights = torch.softmax(-(x - known).square().sum((1, 2, 3)) / (2 * s**2), dim=0)
        mean = (x - (weights[:, None, None, None] * known).sum(0)) / s
        expected = z[one].double() if weights.max() > 0.99 else mean
        assert torch.allclose(found[one].double(), expected, atol=1e-4), one
    assert torch.equal(found[0], z[0]) and not torch.allclose(found[-1], z[-1], atol=0.01)


def test_the_own_noise_is_right_on_average():
    """E[z | x + σ z]: of all samples that come near a point, the mean of their own noise is what the set says there."""
    generator = torch.Generator().manual_seed(0)
    pixels, sigma = torch.tensor([[0.0], [255.0]]).to(torch.uint8).reshape(2, 1, 1, 1), 1.5
    which = torch.randint(0, 2, (400_000,), generator=generator)
    z = torch.randn(400_000, generator=generator)
    x = (2.0 * which - 1) + sigma * z
    scores = DataScore(pixels, None, CPU, flip=False)
    for point in (-2.0, -0.5, 0.0, 1.0):
        near = (x - point).abs() < 0.05
        told = scores.noise(torch.full((1, 1, 1, 1), point), torch.tensor([sigma]), torch.zeros(1, 1, 1, 1), None)
        assert z[near].mean().item() == pytest.approx(told.item(), abs=0.03)


def test_low_levels_are_as_before_to_the_bit():
    pixels, _, z = draws()
    images, high, low = pixels[:6].float() / 127.5 - 1, torch.full((6,), 0.1), torch.full((6,), 0.08)
    noisy = images + 0.1 * z
    lower = step_down(DataScore(pixels, None, CPU, flip=False), images, None, noisy, low, high, z)
    assert torch.equal(lower, images + 0.08 * z)


@pytest.mark.parametrize(("flip", "classes"), [(False, 0), (True, 3)])
def test_a_step_down_follows_the_mean_of_the_set_that_the_recipe_means(flip, classes):
    config = tiny_config(objective={"score": "data"}, data={"flip": flip, "classes": classes})
    pixels, labels, z = draws()
    scores = build_score(config, pixels, labels, CPU)
    assert scores.flip == flip and (scores.labels is None) == (classes == 0)
    images, high, low = pixels[:6].float() / 127.5 - 1, torch.full((6,), 6.0), torch.full((6,), 5.0)
    noisy = images + 6.0 * z
    mean = scores.noise(noisy, high, z, labels[:6])
    assert (mean - z).abs().max() > 0.1
    lower = step_down(scores, images, labels[:6], noisy, low, high, z)
    assert torch.allclose(lower, noisy - mean, atol=1e-5)


@pytest.mark.parametrize("kind", ["ict", "ect"])
def test_the_lower_side_that_the_net_sees_is_one_step_along_it(kind):
    config = tiny_config(
        objective={"kind": kind, "score": "data", "s0": 8, "s1": 8, "p_mean": 2.0}, data={"classes": 0, "flip": False}
    )
    objective, (pixels, labels, _) = build_objective(config), draws(size=8)
    objective.see(pixels, labels, CPU)
    seen = []

    class Spy:
        kind = "consistency"

        def __call__(self, x, sigma, label, key):
            seen.append((x, sigma))
            return x

    objective(Spy(), pixels[:16].float() / 127.5 - 1, None, step_of(16))
    (upper, high), (lower, low) = seen
    known = pixels.double().flatten(1) / 127.5 - 1
    for one in range(16):
        x, s, r = upper[one].double().flatten(), high[one].double(), low[one].double()
        weights = torch.softmax(-(x - known).square().sum(1) / (2 * s**2), dim=0)
        if weights.max() < 0.99:
            expected = x + (r - s) * (x - weights @ known) / s
            assert torch.allclose(lower[one].double().flatten(), expected, atol=1e-4)
    assert (high > 5).sum() > 4


@pytest.mark.parametrize("kind", ["ict", "ect"])
def test_with_one_image_it_changes_nothing_and_with_many_the_lower_side(kind):
    found = {}
    for count in (1, 20):
        for wanted in ("sample", "data"):
            config = tiny_config(
                objective={"kind": kind, "score": wanted, "s0": 8, "s1": 8, "p_mean": 1.0},
                data={"classes": 0, "flip": False},
            )
            objective = build_objective(config)
            pixels, labels, _ = draws(size=8)
            objective.see(pixels[:count], labels[:count], CPU)
            model = build_model(ModelSpec.from_config(config, ())).train()
            for number, parameter in enumerate(model.parameters()):
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
            images = pixels[torch.arange(16) % count].float() / 127.5 - 1
            found[count, wanted] = objective(model, images, None, step_of(16)).per_sample
    assert torch.equal(found[1, "sample"], found[1, "data"])
    same = found[20, "sample"] == found[20, "data"]
    assert same.any() and not same.all()  # low levels are certain, high ones are not


def test_a_warm_up_hands_it_on():
    config = tiny_config(objective={"score": "data", "denoise": 0.5}, data={"classes": 0})
    objective = build_objective(config)
    pixels, labels, _ = draws(size=8)
    objective.see(pixels, labels, CPU)
    assert isinstance(objective.then.score, DataScore)


@pytest.mark.parametrize("classes", [0, 10])
def test_a_run_with_it_resumes_to_the_bit(classes, tmp_path):
    config = tiny_config(objective={"score": "data"}, data={"classes": classes})
    whole = check_resume(config, tmp_path)
    plain = replace(config, objective=replace(config.objective, score="sample"))
    assert not same_weights(trained_weights(plain, tmp_path / "plain"), whole)


def test_where_it_cannot_be_it_is_refused(monkeypatch):
    for kind in OBJECTIVES.keys() - {"ict", "ect"}:
        with pytest.raises(ConfigError, match=r"is for objective\.kind = ict and ect"):
            tiny_config(objective={"kind": kind, "score": "data"}, net={"intervals": kind == "meanflow"})
    with pytest.raises(ConfigError, match='use "sample"'):
        tiny_config(objective={"score": "mean"})
    with pytest.raises(ConfigError, match=r"is for objective\.kind"):
        tiny_config(objective={"score": "data", "coupling": "batch"}, data={"classes": 0})
    monkeypatch.setattr(score, "HOST", 1000)
    with pytest.raises(ConfigError, match="the whole training set in memory"):
        DataScore(draws()[0], None, CPU, flip=False)
