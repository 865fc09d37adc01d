"""CIFAR-10 in every official form, without running a pickle; and the real set where it is at hand."""

import io
import os
import pickle
import shutil
import tarfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers import tiny_config
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ict.data import cifar10 as module
from ict.data import load_images
from ict.data.plainpickle import Call, Name, NotPlain, as_array, read_plain
from ict.files import sha256
from ict.reading import ConfigError

NAMES = [*module.BATCHES["train"], *module.BATCHES["test"]]


@pytest.fixture(autouse=True)
def _small_files(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "RECORDS", 7)
    monkeypatch.setenv("ICT_CACHE", str(tmp_path / "cache"))


class Python2Pickler(pickle._Pickler):
    """Writes what Python 2 wrote: texts as byte strings, and NumPy by its old names."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_text(self, value):
        data = value.encode("latin-1") if isinstance(value, str) else value
        if len(data) < 256:
            self.write(pickle.SHORT_BINSTRING + bytes([len(data)]) + data)
        else:
            self.write(pickle.BINSTRING + len(data).to_bytes(4, "little") + data)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_text

    def save_global(self, value, name=None):
        self.write(pickle.GLOBAL + f"{value.__module__}\n{name or value.__name__}\n".replace("_core", "core").encode())
        self.memoize(value)

    dispatch[type] = dispatch[type(np.zeros)] = dispatch[type(lambda: 0)] = save_global


def pickled(value) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue()


def python_batch(records: np.ndarray) -> bytes:
    names = [f"image_s_{i:06d}.png" for i in range(len(records))]
    batch = {"batch_label": "training batch 1 of 5", "labels": records[:, 0].tolist(), "data": records[:, 1:].copy()}
    return pickled({**batch, "filenames": names})


def write_sets(root: Path, batches: dict[str, np.ndarray]) -> list[Path]:
    """All forms of one set: two folders, a folder above one, and two archives."""
    for folder in ("cifar-10-batches-bin", "cifar-10-batches-py"):
        (root / folder).mkdir(parents=True)
    for name, records in batches.items():
        (root / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(records.tobytes())
        (root / "cifar-10-batches-py" / name).write_bytes(python_batch(records))
    forms = []
    for folder in ("cifar-10-batches-bin", "cifar-10-batches-py"):
        (root / folder / "readme.html").write_text("nothing of interest")
        archive = root / f"{folder}.tar.gz"
        with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
            tar.add(root / folder, folder)
        plain = root / f"{folder}.tar"
        with tarfile.open(plain, "w") as tar:
            tar.add(root / folder, folder)
        forms += [root / folder, archive, plain]
    return [root, *forms]


def small_batches(count: int = 7) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    batches = {name: rng.integers(0, 256, (count, 3073), dtype=np.uint8) for name in NAMES}
    for records in batches.values():
        records[:, 0] = rng.integers(0, 10, count)
    return batches


def cifar10(path, **data):
    values = {"source": "cifar10", "path": str(path), "image_size": 32, "channels": 3, "classes": 10, **data}
    return load_images(tiny_config(data=values).data)


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_form_gives_the_same(split, tmp_path):
    batches = small_batches()
    expected = np.concatenate([batches[name] for name in module.BATCHES[split]])
    for form in write_sets(tmp_path, batches):
        images = cifar10(form, split=split)
        assert images.labels.tolist() == expected[:, 0].tolist(), form
        assert torch.equal(images.pixels.flatten(1), torch.from_numpy(expected[:, 1:])), form
        assert images.class_names[6] == "frog"
        if form.is_dir() and form != tmp_path:
            named = cifar10("", source=str(form), split=split)  # the path alone says what it is
            assert torch.equal(named.pixels, images.pixels)
            assert torch.equal(named.labels, images.labels)
    assert images.pixels[0, 2, 31, 30] == expected[0, 1 + 2 * 1024 + 31 * 32 + 30]  # planes, then rows


def test_a_folder_of_pictures_is_not_taken_for_it(tmp_path):
    """Not even with a whole CIFAR-10 beside the pictures, or with a file that is called like a part of it."""
    write_sets(tmp_path / "parts", small_batches())
    parts = tmp_path / "parts" / "cifar-10-batches-bin"
    assert module.is_cifar10(parts)
    for stray in (["test_batch"], ["data_batch_1.bin"], [f"data_batch_{i}.bin" for i in range(1, 6)], [parts.name]):
        folder = tmp_path / "-".join(stray)
        (folder / "cats").mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (40, 40), (80 * number, 0, 0)).save(folder / "cats" / f"{number}.png")
        for name in stray:
            (shutil.copytree if (parts.parent / name).is_dir() else shutil.copy)(
                parts.parent / name if name == parts.name else parts / "test_batch.bin", folder / name
            )
        assert len(cifar10("", source=str(folder), classes=0)) == 3
    for name in ("", "nowhere", "parts/cifar-10-batches-bin.tar", "parts/cifar-10-batches-bin/test_batch.bin"):
        assert not module.is_cifar10(tmp_path / name)


def test_pickles_of_python_3_too(tmp_path):
    for protocol in (2, 3, 4):
        array = np.arange(12, dtype=np.uint8).reshape(3, 4)
        found = read_plain(pickle.dumps({b"data": array, "labels": [1, 2, None, True, 2.5, -70000]}, protocol))
        assert np.array_equal(as_array(found[b"data"]), array)
        assert found["labels"] == [1, 2, None, True, 2.5, -70000]


def test_a_pickle_is_never_run(tmp_path):
    trap = tmp_path / "trap"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(trap),)

    for records in write_sets(tmp_path / "sets", small_batches())[:1]:
        path = records / "cifar-10-batches-py" / "data_batch_2"
        (records / "cifar-10-batches-bin" / "data_batch_2.bin").unlink()
        for evil in (
            Evil(),
            {"data": Evil(), "labels": [1] * 7},
            {"data": np.zeros((7, 3072), np.uint8), "labels": Evil()},
        ):
            path.write_bytes(pickle.dumps(evil, protocol=2))
            with pytest.raises(ConfigError, match="data_batch_2 is damaged"):
                cifar10(records)
    assert not trap.exists()


@given(st.data())
def test_a_damaged_pickle_is_refused_and_nothing_else(data):
    whole = bytearray(python_batch(small_batches(2)["test_batch"]))
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, len(whole) - 1) | st.integers(0, 120))
        whole[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)) | st.just(len(whole)))
    try:
        found = read_plain(bytes(whole[:cut]))
    except NotPlain:
        return
    assert found is None or type(found) in (dict, list, tuple, str, bytes, int, float, bool, Call, Name, object)


def test_only_arrays_of_bytes_are_taken():
    for wrong in (np.zeros(3), np.zeros((2, 3), np.uint8, order="F").T.copy(order="F"), np.array([{}])):
        with pytest.raises(NotPlain):
            as_array(read_plain(pickle.dumps(wrong, protocol=2)))
    for wrong in ("text", [1], None):
        with pytest.raises(NotPlain):
            as_array(wrong)


def test_a_set_that_is_missing_or_damaged(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no data_batch_1: bring CIFAR-10 by `ict data get cifar10`"):
        cifar10(tmp_path)
    with pytest.raises(ConfigError, match="cifar10 has train and test"):
        cifar10(tmp_path, split="val")
    write_sets(tmp_path / "c", small_batches())
    path = tmp_path / "c" / "cifar-10-batches-bin" / "data_batch_3.bin"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-3073], b"", b"\xff" + whole[1:]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"data_batch_3\.bin is damaged"):
            cifar10(tmp_path / "c" / "cifar-10-batches-bin")
    archive = tmp_path / "c" / "cifar-10-batches-bin.tar.gz"
    archive.write_bytes(archive.read_bytes()[:2000])
    with pytest.raises(ConfigError, match="is damaged or not a"):
        cifar10(archive)


def test_unpacking_the_official_archive_checks_every_batch(tmp_path, monkeypatch):
    batches = small_batches()
    archive = write_sets(tmp_path, batches)[2]
    with pytest.raises(ConfigError, match="data_batch_1 is missing or is not the official one"):
        module.unpack(archive, module.home())
    assert not module.is_home()
    monkeypatch.setattr(module, "CHECKSUMS", {name: sha256(records.tobytes()) for name, records in batches.items()})
    module.unpack(archive, module.home())
    assert module.is_home()
    assert len(cifar10("")) == 35  # found without a path
    place = module.home() / "test_batch.bin"
    place.write_bytes(place.read_bytes()[::-1])
    assert not module.is_home()


REAL = Path(os.environ.get("ICT_CIFAR10", "no such folder"))


@pytest.mark.skipif(not REAL.exists(), reason="set ICT_CIFAR10 to the folder of CIFAR-10's binary version")
def test_the_real_cifar10(tmp_path, monkeypatch):
    """Run by `make test-data CIFAR10=…`: every form of the real images gives identical bytes."""
    monkeypatch.setattr(module, "RECORDS", 10_000)
    batches = dict(module.read_batches(REAL, tuple(NAMES)))
    for name in NAMES:
        assert sha256(batches[name].tobytes()) == module.CHECKSUMS[name]
    sets = [cifar10(form) for form in write_sets(tmp_path, batches)]
    for images in sets:
        assert torch.equal(images.pixels, sets[0].pixels) and torch.equal(images.labels, sets[0].labels)
    assert torch.bincount(sets[0].labels).tolist() == [5000] * 10
    assert sets[0].class_names[sets[0].labels[0]] == "frog"
    assert len(cifar10(REAL, split="test")) == 10_000


# --- ImageNet 64×64


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
        with pytest.raises(ConfigError, match=r"labels must be|whole numbers from 1 to 1000"):
            imagenet64(tmp_path)
    np.savez(path, data=np.zeros((1, 12288), np.uint8), labels=np.array([0]))
    with pytest.raises(ConfigError, match="whole numbers from 1 to 1000"):
        imagenet64(tmp_path)
    np.savez(path, data=np.array([{}], dtype=object), labels=np.array([1]))  # a pickle inside is never opened
    with pytest.raises(ConfigError, match="is not a set of images"):
        imagenet64(tmp_path)


def test_batches_come_in_the_order_of_their_numbers(tmp_path):
    for i in (1, 2, 10):
        np.savez(tmp_path / f"train_data_batch_{i}.npz", data=np.full((1, 12288), i, np.uint8), labels=[i])
    assert imagenet64(tmp_path).pixels[:, 0, 0, 0].tolist() == [1, 2, 10]
