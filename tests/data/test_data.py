import io

import numpy as np
import pytest
import torch
from helpers import tiny_config
from hypothesis import given
from hypothesis import strategies as st

from ict.config import ConfigError, DataConfig
from ict.data import batch_indices, flip_mask, load_images, to_float, to_uint8


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


def write_cifar10(folder, count=7):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(1, 6):
        records = rng.integers(0, 256, (count, 3073), dtype=np.uint8)
        records[:, 0] = rng.integers(0, 10, count)
        (folder / f"data_batch_{i}.bin").write_bytes(records.tobytes())


def cifar10(folder, **data):
    values = {"source": "cifar10", "path": str(folder), "image_size": 32, "channels": 3, "classes": 10, **data}
    return load_images(tiny_config(data=values).data)


@pytest.fixture(autouse=True)
def _small_files(monkeypatch):
    monkeypatch.setattr("ict.data.cifar10.RECORDS", 7)


def test_cifar10_from_its_binary_files(tmp_path):
    write_cifar10(tmp_path / "c")
    images = cifar10(tmp_path / "c")
    first = np.frombuffer((tmp_path / "c" / "data_batch_1.bin").read_bytes(), np.uint8)[:3073]
    assert len(images) == 35 and images.class_names[6] == "frog"
    assert images.labels[0] == first[0]
    assert images.pixels[0, 2, 31, 30] == first[1 + 2 * 1024 + 31 * 32 + 30]  # planes, then rows


def test_cifar10_that_is_missing_or_damaged(tmp_path):
    with pytest.raises(ConfigError, match=r"data_batch_1\.bin is not there: set data\.path"):
        cifar10(tmp_path)
    write_cifar10(tmp_path / "c")
    path = tmp_path / "c" / "data_batch_3.bin"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-3073], b"", b"\xff" + whole[1:]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"data_batch_3\.bin is damaged"):
            cifar10(tmp_path / "c")


def imagenet64(folder):
    values = {"source": "imagenet64", "path": str(folder), "image_size": 64, "channels": 3, "classes": 1000}
    return load_images(tiny_config(data=values).data)


def test_imagenet64_from_its_npz_batches(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, (4, 12288), dtype=np.uint8)
    np.savez(tmp_path / "train_data_batch_1.npz", data=data[:3], labels=[1, 1000, 7], mean=np.zeros(1))
    np.savez(tmp_path / "train_data_batch_2.npz", data=data[3:], labels=[2])
    images = imagenet64(tmp_path)
    assert images.labels.tolist() == [0, 999, 6, 1] and images.pixels.shape == (4, 3, 64, 64)
    assert images.pixels[3, 1, 2, 5] == data[3, 4096 + 2 * 64 + 5]


def test_imagenet64_that_is_missing_or_damaged(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no train_data_batch"):
        imagenet64(tmp_path)
    path = tmp_path / "train_data_batch_1.npz"
    np.savez_compressed(
        path, data=np.random.default_rng(0).integers(0, 9, (3, 12288), dtype=np.uint8), labels=[1, 2, 3]
    )
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    for damaged in (b"nonsense", b"", whole[: len(whole) // 2], bytes(flipped), buffer.getvalue()):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="is damaged"):
            imagenet64(tmp_path)
    for labels in (3, [[1]], [1.5], ["a"], [True]):
        np.savez(path, data=np.zeros((1, 12288), np.uint8), labels=np.array(labels))
        with pytest.raises(ConfigError, match="whole numbers from 1 to 1000"):
            imagenet64(tmp_path)
    np.savez(path, data=np.zeros((1, 12288), np.uint8), labels=np.array([0]))
    with pytest.raises(ConfigError, match="whole numbers from 1 to 1000"):
        imagenet64(tmp_path)
    np.savez(path, data=np.array([{}], dtype=object), labels=np.array([1]))  # a pickle inside is never opened
    with pytest.raises(ConfigError, match="is damaged"):
        imagenet64(tmp_path)


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
