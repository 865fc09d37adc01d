import pytest
import torch
from helpers import tiny_config
from hypothesis import given
from hypothesis import strategies as st

from ict.config import DataConfig
from ict.data import batch_indices, flip_mask, load_images
from ict.pixels import to_float, to_uint8
from ict.reading import ConfigError


def test_digits_are_those_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.datasets").load_digits()
    ours = load_images(DataConfig())
    assert ours.pixels.shape == (1797, 1, 8, 8)
    assert torch.equal(ours.labels, torch.from_numpy(sklearn.target))
    ink = torch.from_numpy(sklearn.images)
    assert (ours.pixels[:, 0].double() * 16 / 255 - ink).abs().max() < 0.04
    assert ours.pixels.min() == 0 and ours.pixels.max() == 255


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"image_size": 16}, "set data.image_size = 8"),
        ({"channels": 3}, "data.channels = 1"),
        ({"classes": 7}, "has 10 classes"),
        ({"source": "digit"}, "did you mean 'digits'"),
    ],
)
def test_a_recipe_that_does_not_fit_the_data_is_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        load_images(tiny_config(data=data).data)


def test_pixels_survive_the_round_trip():
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    x = to_float(pixels)
    assert x.min() == -1 and x.max() == 1
    assert torch.equal(to_uint8(x), pixels)
    assert to_uint8(torch.tensor([-7.0, 7.0])).tolist() == [0, 255]


@given(st.integers(1, 50), st.integers(1, 60), st.integers(1, 4), st.integers(0, 9))
def test_every_image_comes_once_per_epoch(count, batch, epochs, seed):
    """Whatever the batch size, also one that is larger than the set."""
    steps = -(-count * epochs // batch)
    seen = torch.cat([batch_indices(step, batch=batch, count=count, seed=seed) for step in range(steps)])
    for epoch in range(epochs):
        assert seen[epoch * count : (epoch + 1) * count].sort().values.tolist() == list(range(count))


def test_the_order_is_a_function_of_seed_and_step():
    first = batch_indices(1000, batch=64, count=1797, seed=3)
    batch_indices(5, batch=64, count=1797, seed=3)
    assert torch.equal(batch_indices(1000, batch=64, count=1797, seed=3), first)
    assert not torch.equal(batch_indices(1000, batch=64, count=1797, seed=4), first)


def test_every_epoch_has_its_own_order():
    first, second = (batch_indices(step, batch=100, count=100, seed=0) for step in (0, 1))
    assert not torch.equal(first, second)


def test_half_of_the_images_are_mirrored():
    flips = flip_mask(torch.arange(10_000), seed=0, step=0)
    assert abs(flips.double().mean() - 0.5) < 0.02
    assert torch.equal(flip_mask(torch.arange(500, 600), seed=0, step=0), flips[500:600])
