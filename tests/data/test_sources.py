"""Compressed tars, WebDataset shards, arrays and Hugging Face sets give the pixels that a folder gives."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_config, write_tar
from PIL import Image

from ict.config import DataConfig
from ict.data import load_images
from ict.data.inspect import inspect
from ict.data.pile import Pile
from ict.data.prepare import prepare, read_manifest
from ict.data.sources import open_source
from ict.reading import ConfigError

SIZE, COUNT = 8, 10
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (COUNT, SIZE, SIZE, 3), dtype=np.uint8)
CLASSES = [i % 3 for i in range(COUNT)]


def data(source, **changes) -> DataConfig:
    return tiny_config(data={"source": str(source), "channels": 3, "classes": 0, **changes}).data


def manifest_of(config: DataConfig) -> dict:
    pile = open_source(config)
    assert isinstance(pile, Pile)
    return read_manifest(prepare(pile, config))


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def files() -> list[tuple[str, bytes]]:
    return [(f"{label}/{i:02d}.png", png(PIXELS[i])) for i, label in enumerate(CLASSES)]


def the_same(images, order=range(COUNT)) -> bool:
    expected = torch.from_numpy(PIXELS[list(order)]).permute(0, 3, 1, 2)
    return torch.equal(images.pixels, expected) and images.labels.tolist() == [CLASSES[i] for i in order]


# --- tars


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"])
def test_tars_compressed_or_not(ending, tmp_path):
    mode = {".tar": "w", ".tar.bz2": "w:bz2", ".tar.xz": "w:xz"}.get(ending, "w:gz")
    path = write_tar(tmp_path / f"pile{ending}", files(), mode)
    images = load_images(data(path, classes=3))
    assert the_same(images) and images.class_names == ("0", "1", "2")


def test_a_tar_whose_name_hides_that_it_is_compressed(tmp_path):
    assert the_same(load_images(data(write_tar(tmp_path / "pile.tar", files(), "w:gz"))))


def test_a_compressed_tar_that_is_cut_off_gives_what_it_has(tmp_path):
    noise = [(f"0/{i}.png", png(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8))) for i in range(40)]
    path = write_tar(tmp_path / "pile.tar.gz", noise, "w:gz")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    manifest = manifest_of(data(path))
    assert 10 <= manifest["count"] < 25
    assert manifest["refused"][-1][0] == "pile.tar.gz" and "damaged after" in manifest["refused"][-1][1]


def test_a_compressed_bomb_is_not_unpacked(tmp_path):
    bomb = [("0/a.png", png(PIXELS[0])), ("0/huge.png", bytes(200 << 20))]
    path = write_tar(tmp_path / "pile.tar.gz", bomb, "w:gz")
    assert path.stat().st_size < 1 << 20
    manifest = manifest_of(data(path))
    assert manifest["count"] == 1 and "unpacks to more than 200 times" in json.dumps(manifest["refused"])


# --- WebDataset


def test_shards_with_classes_beside_the_images(tmp_path):
    numbers = [("7", "10", "2")[label] for label in CLASSES]
    content = []
    for i, number in enumerate(numbers):
        content += [(f"{i:04d}.png", png(PIXELS[i]))]
        content += [
            (f"{i:04d}.cls", number.encode())
            if i % 2
            else (f"{i:04d}.json", json.dumps({"label": int(number)}).encode())
        ]
        content += [(f"{i:04d}.txt", b"a caption")]
    write_tar(tmp_path / "shard-000.tar", content[:15])
    write_tar(tmp_path / "shard-001.tar", content[15:], "w:gz")
    images = load_images(data(tmp_path / "shard-{000..001}.tar", classes=3))
    assert images.class_names == ("2", "7", "10")  # numbers by their value
    assert [images.class_names[i] for i in images.labels] == numbers


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1, 2]", b"{}", b'{"label": [1]}', b"[" * 100_000, b"null"])
def test_labels_that_say_nothing(content, tmp_path):
    path = write_tar(tmp_path / "s.tar", [("a/0.png", png(PIXELS[0])), ("a/0.json", content)])
    assert load_images(data(path)).class_names == ("a",)


def test_the_class_comes_before_or_after_its_image(tmp_path):
    path = write_tar(
        tmp_path / "s.tar", [("0.cls", b"x"), ("0.png", png(PIXELS[0])), ("1.png", png(PIXELS[1])), ("1.cls", b"y")]
    )
    images = load_images(data(path))
    assert images.class_names == ("x", "y") and images.labels.tolist() == [0, 1]


# --- arrays


def test_arrays_in_every_layout(tmp_path):
    np.save(tmp_path / "a.npy", PIXELS)
    np.save(tmp_path / "b.npy", PIXELS.transpose(0, 3, 1, 2).copy())
    assert torch.equal(load_images(data(tmp_path / "a.npy")).pixels, load_images(data(tmp_path / "b.npy")).pixels)
    np.savez(tmp_path / "c.npz", images=PIXELS, labels=CLASSES)
    np.savez_compressed(tmp_path / "d.npz", x_train=PIXELS, y_train=CLASSES)
    np.savez(tmp_path / "e.npz", whatever=PIXELS)
    assert the_same(load_images(data(tmp_path / "c.npz", classes=3)))
    assert the_same(load_images(data(tmp_path / "d.npz", classes=3)))
    assert len(load_images(data(tmp_path / "e.npz"))) == COUNT
    np.save(tmp_path / "grey.npy", PIXELS[..., 0])
    grey = load_images(data(tmp_path / "grey.npy", channels=1))
    assert torch.equal(grey.pixels[:, 0], torch.from_numpy(PIXELS[..., 0].copy()))
    assert torch.equal(load_images(data(tmp_path / "grey.npy")).pixels[:, 1], grey.pixels[:, 0])


def test_arrays_of_another_size_are_made_to_fit(tmp_path):
    np.save(tmp_path / "a.npy", np.full((300, 20, 16, 3), 77, np.uint8))
    images = load_images(data(tmp_path / "a.npy"))
    assert images.pixels.shape == (300, 3, 8, 8) and bool((images.pixels == 77).all())
    found = inspect(data(tmp_path / "a.npy"))
    assert found.sizes["largest"] == [16, 20] and found.sizes["enlarged"] == 0


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (PIXELS.astype(np.float32), "give uint8 from 0 to 255"),
        (np.asfortranarray(PIXELS), "Fortran order"),
        (PIXELS.reshape(-1), "is not a set of images"),
        (PIXELS.reshape(COUNT, -1), "are not known"),
        (np.array([{}] * 3), "is not a set of images"),
    ],
)
def test_arrays_that_are_no_images(array, message, tmp_path):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ConfigError, match=message):
        load_images(data(tmp_path / "a.npy"))


def test_arrays_that_are_damaged_or_do_not_fit_their_labels(tmp_path):
    np.savez(tmp_path / "a.npz", images=PIXELS, labels=[1, 2])
    with pytest.raises(ConfigError, match="10 images, but 2 labels"):
        load_images(data(tmp_path / "a.npz"))
    np.savez(tmp_path / "b.npz", one=PIXELS, two=PIXELS)
    with pytest.raises(ConfigError, match="no array of images among one, two"):
        load_images(data(tmp_path / "b.npz"))
    np.save(tmp_path / "c.npy", PIXELS)
    whole = (tmp_path / "c.npy").read_bytes()
    for damaged in (whole[:-1], whole[:50], b"", b"nonsense"):
        (tmp_path / "c.npy").write_bytes(damaged)
        with pytest.raises(ConfigError, match="damaged"):
            load_images(data(tmp_path / "c.npy"))


# --- Hugging Face


def hub_set(tmp_path: Path, *, classes: bool = True):
    datasets = pytest.importorskip("datasets")
    features = {"picture": datasets.Image()}
    rows: dict = {"picture": [{"bytes": png(one), "path": None} for one in PIXELS]}
    if classes:
        features["kind"] = datasets.ClassLabel(names=["cat", "dog", "eel"])
        rows["kind"] = CLASSES
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def test_a_hugging_face_set_saved_on_the_disk(tmp_path):
    rows = hub_set(tmp_path)
    rows.save_to_disk(str(tmp_path / "one"))
    images = load_images(data(f"hf:{tmp_path}/one", classes=3))
    assert the_same(images) and images.class_names == ("cat", "dog", "eel")
    import datasets

    datasets.DatasetDict({"train": rows, "test": rows.select(range(4))}).save_to_disk(str(tmp_path / "two"))
    assert len(load_images(data(f"hf:{tmp_path}/two", split="test"))) == 4
    with pytest.raises(ConfigError, match=r"data\.split = 'val' cannot be opened"):
        load_images(data(f"hf:{tmp_path}/two", split="val"))


def test_a_hugging_face_set_in_parquet_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "set").mkdir()
    rows = hub_set(tmp_path, classes=False)
    rows.to_parquet(str(tmp_path / "set" / "train-00000-of-00001.parquet"))
    images = load_images(data(f"hf:{tmp_path}/set"))
    assert torch.equal(images.pixels, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))
    assert images.class_names == ("",)


def test_rows_without_an_image_or_a_class_are_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    good = {"bytes": png(PIXELS[0]), "path": None}
    rows = {"image": [good, None, good, {"bytes": b"text", "path": None}], "label": [1, 0, None, 0]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "set"))
    manifest = manifest_of(data(f"hf:{tmp_path}/set"))
    assert manifest["count"] == 1 and manifest["classes"] == {"a": 0, "b": 1}
    assert [reason.split(" ")[0] for _, reason in manifest["refused"]] == ["no", "no", "not"]


def test_a_hugging_face_set_without_images(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(ConfigError, match="no column of images, only text"):
        load_images(data(f"hf:{tmp_path}/set"))


def test_without_the_library(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'ict\[datasets\]'"):
        load_images(data("hf:owner/name"))


# --- which set is which


def test_two_archives_of_one_name_size_and_time_are_not_mistaken(tmp_path):
    for name, pixels in (("one", PIXELS[0]), ("two", PIXELS[1])):
        (tmp_path / name).mkdir()
        path = write_tar(tmp_path / name / "pile.tar", [("a.bmp", bmp(pixels))])
        os.utime(path, ns=(0, 0))
    one, two = (load_images(data(tmp_path / name / "pile.tar")) for name in ("one", "two"))
    assert not torch.equal(one.pixels, two.pixels)


def bmp(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "BMP")
    return buffer.getvalue()


def test_a_source_that_is_not_divided_has_no_splits(tmp_path):
    np.save(tmp_path / "a.npy", PIXELS)
    with pytest.raises(ConfigError, match="is not divided"):
        load_images(data(tmp_path / "a.npy", split="test"))
    with pytest.raises(ConfigError, match="not divided"):
        load_images(tiny_config(data={"split": "test"}).data)
