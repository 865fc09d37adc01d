import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import SpyNet, gaussian_model, tiny_config

from ict import rng
from ict.config import NoiseConfig
from ict.model import ConsistencyModel, ModelSpec, build_model
from ict.pixels import to_uint8
from ict.reading import ConfigError
from ict.rng import Stream
from ict.sampling import Generator, class_number, level_ladder


def generator(classes: int = 10, **net) -> Generator:
    spec = ModelSpec.from_config(tiny_config(net=net, data={"classes": classes}), tuple("0123456789"))
    model = build_model(spec)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return Generator(model, spec)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_an_image_does_not_depend_on_the_batch_it_is_drawn_in(steps):
    g = generator()
    images = g.sample(13, steps=steps, seed=5, batch=256)
    for batch in (1, 2, 5, 13):
        again = g.sample(13, steps=steps, seed=5, batch=batch)
        assert torch.allclose(again, images, atol=1e-5) and torch.equal(to_uint8(again), to_uint8(images))
    assert torch.allclose(g.sample(7, steps=steps, seed=5), images[:7], atol=1e-5)
    assert not torch.allclose(g.sample(13, steps=steps, seed=6), images, atol=0.1)


def test_images_are_drawn_in_evaluation_mode_without_gradients():
    g = generator(dropout=0.5)
    g.model.train()
    fresh = Generator(g.model, g.spec)
    images = fresh.sample(2)
    assert not fresh.model.training and not images.requires_grad


def spied_generator() -> tuple[Generator, SpyNet]:
    net, noise = SpyNet(), NoiseConfig()
    spec = ModelSpec(image_size=8, channels=1, noise=noise)
    return Generator(ConsistencyModel(net, noise, image_shape=(1, 8, 8)), spec), net


def test_one_step_calls_the_net_once_on_noise_of_sigma_max():
    g, net = spied_generator()
    g.sample(400, batch=400)
    (call,) = net.calls
    assert torch.exp(4 * call["c_noise"]) == pytest.approx(torch.full((400,), 80.0), rel=1e-4)
    noisy = call["x"] * math.sqrt(80**2 + 0.25)
    assert noisy.std().item() == pytest.approx(80, rel=0.02)


def test_further_steps_add_back_noise_of_the_levels_own_size():
    """√(σ² − σ_min²) z: with a list index as the scale, or with σ alone, this fails."""
    g, net = spied_generator()
    sigmas = [80.0, 24.0, 0.01, 0.0021]
    numbers = torch.arange(5)
    x = g.sample(5, sigmas=sigmas, seed=3, clip=False)
    expected = torch.zeros(5, 1, 8, 8)
    for call, sigma in enumerate(sigmas):
        z = rng.normal(numbers, (1, 8, 8), seed=3, step=call, stream=Stream.SAMPLING)
        noisy = expected + (sigma if call == 0 else math.sqrt(sigma**2 - 0.002**2)) * z
        assert torch.allclose(net.calls[call]["x"], noisy / math.sqrt(sigma**2 + 0.25), rtol=1e-4, atol=1e-6)
        expected = noisy * 0.25 / ((sigma - 0.002) ** 2 + 0.25)  # F = 0, so f = c_skip · x
    assert torch.allclose(x, expected, rtol=1e-4, atol=1e-6)


def test_each_step_is_clipped_unless_asked_not_to_be():
    class Loud(SpyNet):
        def forward(self, x, c_noise, label=None, key=None):
            super().forward(x, c_noise, label, key)
            return 9 * x

    g, _ = spied_generator()
    net = g.model.net = Loud()
    clipped = g.sample(50, sigmas=[80.0, 0.5])
    between = net.calls[1]["x"] * math.sqrt(0.5) - math.sqrt(0.25 - 0.002**2) * rng.normal(
        torch.arange(50), (1, 8, 8), seed=0, step=1, stream=Stream.SAMPLING
    )
    assert between.abs().max() == pytest.approx(1, abs=1e-5) and clipped.abs().max() == 1
    assert g.sample(50, sigmas=[80.0, 0.5], clip=False).abs().max() > 3


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_exact_model_samples_the_exact_distribution(steps):
    """The exact consistency function of N(0, s²) turns noise into N(0, s² + σ_min²), in any number of steps."""
    noise = NoiseConfig()
    g = Generator(gaussian_model(0.5, noise), ModelSpec(image_size=8, channels=1, noise=noise))
    x = g.sample(2000, steps=steps, seed=0, clip=False)
    assert x.std().item() == pytest.approx(0.5, rel=0.01)
    assert abs(x.mean().item()) < 0.005


def test_the_ladder_of_levels():
    noise = NoiseConfig()
    assert level_ladder(1, noise, sigma_mid=0.821) == [80.0]
    assert level_ladder(2, noise, sigma_mid=0.821) == [80.0, 0.821]
    four = level_ladder(4, noise, sigma_mid=0.821)
    assert four[0] == 80.0 and four[-1] == 0.821
    roots = [sigma ** (1 / 7) for sigma in four]
    assert roots[0] - roots[1] == pytest.approx(roots[1] - roots[2]) == pytest.approx(roots[2] - roots[3])


def test_classes_are_asked_for_by_number_or_name():
    g = generator()
    assert torch.allclose(g.sample(3, label=7), g.sample(3, label="7"))
    plain = g.sample(3, label=7, seed=3, batch=2)
    for seven in (
        np.int64(7),
        np.array(7),
        torch.tensor(7),
        torch.tensor([7, 7, 7]),
        np.full(3, 7),
        ["7", 7, np.int8(7)],
    ):
        assert torch.equal(g.sample(3, label=seven, seed=3, batch=2), plain)
    for three in (np.uint8(3), torch.tensor(3)):
        assert torch.equal(g.sample(three, label=7, seed=three, batch=np.int16(2), steps=torch.tensor(1)), plain)
    assert torch.allclose(g.sample(3, label=[1, 2, 3])[1:2], g.sample(2, label=2)[1:2], atol=1e-5)
    assert not torch.allclose(g.sample(1, label=1), g.sample(1, label=2))
    assert class_number("cat", ["dog", "cat"]) == 1


def test_classes_left_out_are_drawn_evenly_and_by_the_seed():
    g = generator()
    drawn = g.labels(5000, seed=1)
    assert torch.bincount(drawn, minlength=10).min() > 400
    assert torch.equal(g.labels(10, seed=1), drawn[:10])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "at least 1 image"),
        ({"n": 1, "steps": 0}, "steps = 0"),
        ({"n": 1, "batch": 0}, "batch = 0"),
        ({"n": 1, "seed": -1}, "seed = -1"),
        ({"n": 1, "label": 10}, "classes 0 to 9"),
        ({"n": 1, "label": "ten"}, "no class is called 'ten'"),
        ({"n": 2, "label": [1, 2, 3]}, "3 labels for 2 images"),
        ({"n": 1, "sigmas": [80.0, 90.0]}, "falling"),
        ({"n": 1, "sigmas": [80.0, 0.002]}, "above 0.002"),
        ({"n": 1, "sigmas": [40.0]}, "start at 80"),
        ({"n": 1, "sigmas": []}, "falling"),
        ({"n": 2.5}, "n = 2.5: use a whole number"),
        ({"n": 1, "steps": 1.5}, "steps = 1.5: use a whole number"),
        ({"n": 1, "seed": "x"}, "seed = 'x': use a whole number"),
        ({"n": 1, "label": 3.5}, "label = 3.5: use a whole number"),
        ({"n": 1, "label": [None]}, "label = None: use a whole number"),
        ({"n": torch.tensor(2.5)}, "use a whole number"),
        ({"n": np.array([2, 3])}, "use a whole number"),
        ({"n": 2, "label": torch.tensor([1.5, 2.0])}, "use a whole number"),
        ({"n": 2, "label": np.array([[1, 2], [2, 3]])}, "use a whole number"),
        ({"n": 1, "steps": 10**9}, "steps = 1000000000: use 1 to 1000"),
        ({"n": 1, "steps": 2, "sigmas": [80.0, 0.8]}, "exclude each other"),
        ({"n": 1, "sigmas": "80,0.8"}, "sigmas = 80,0.8: give a list"),
        ({"n": 1, "sigmas": [80, None]}, "give a list"),
        ({"n": 1, "sigmas": 80.0}, "give a list"),
        ({"n": 1, "sigmas": [80, float("nan")]}, "falling"),
        ({"n": 2, "label": {1, 2}}, "give one class, or a list"),
        ({"n": 1, "label": {"1": 1}}, "give one class, or a list"),
        ({"n": 1, "label": b"7"}, "give one class, or a list"),
        ({"n": 1, "label": "9" * 5000}, "no class is called"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        generator().sample(**arguments)


def test_levels_of_any_kind_of_number():
    g = generator()
    plain = g.sample(2, sigmas=[80.0, 0.5])
    for levels in ((80, 0.5), np.array([80, 0.5]), torch.tensor([80, 0.5])):
        assert torch.equal(g.sample(2, sigmas=levels), plain)


def test_batches_are_the_samples_and_refuse_at_once():
    g = generator()
    drawn = list(g.batches(5, batch=2, seed=3))
    assert [len(some) for some in drawn] == [2, 2, 1]
    assert torch.equal(torch.cat(drawn), g.sample(5, batch=2, seed=3))
    with pytest.raises(ConfigError, match="at least 1 image"):
        g.batches(0)


def test_a_diffusion_model_takes_no_steps_only_when_none_are_asked_for():
    g = generator()
    g = Generator(g.model, replace(g.spec, kind="diffusion"))
    assert len(g.ladder()) == 18
    with pytest.raises(ConfigError, match="steps = 0"):
        g.ladder(0)


def test_a_long_list_of_classes_is_not_told_whole():
    with pytest.raises(ConfigError, match=r"'19', … \(1,000 in all\)$"):
        class_number("cat", [str(i) for i in range(1000)])


def test_a_device_is_picked_as_on_the_command_line():
    assert generator().to("auto").device.type in ("cpu", "cuda")
    with pytest.raises(ConfigError, match="cannot be used here"):
        generator().to("cuda:99")
    with pytest.raises(ConfigError, match="cannot be used here"):
        generator().to("nonsense")


def test_a_model_without_classes_takes_no_label():
    g = generator(classes=0)
    assert g.sample(2).shape == (2, 1, 8, 8)
    with pytest.raises(ConfigError, match="without class labels"):
        g.sample(2, label=1)


def test_progress_is_reported():
    seen = []
    generator().sample(5, batch=2, progress=seen.append)
    assert seen == [2, 4, 5]
