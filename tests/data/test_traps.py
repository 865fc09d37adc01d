"""Traps that were once fallen into: data that was silently wrong, lost, or too much."""

import io
import os
import struct
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_config, write_tar
from PIL import Image

import ict.data.workers as workers
from ict.config import DataConfig
from ict.data import load_images
from ict.data.decode import Target, decode
from ict.data.inspect import inspect
from ict.data.pile import Pile
from ict.data.plainpickle import Call, NotPlain, read_plain
from ict.data.prepare import prepare, read_manifest, sort_labels
from ict.data.sources import open_source
from ict.reading import ConfigError


def data(source, **changes) -> DataConfig:
    return tiny_config(data={"source": str(source), "channels": 3, "classes": 0, **changes}).data


def manifest_of(source, **changes) -> dict:
    config = data(source, **changes)
    pile = open_source(config)
    assert isinstance(pile, Pile)
    return read_manifest(prepare(pile, config))


def encoded(value: int, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (value, 0, 0)).save(buffer, form)
    return buffer.getvalue()


def classes_of(source) -> dict[int, str]:
    """The class of each image, by its colour."""
    images = load_images(data(source))
    reds = images.pixels[:, 0, 0, 0].tolist()
    return {red: images.class_names[label] for red, label in zip(reds, images.labels.tolist(), strict=True)}


# --- tars


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("damage", ["flip", "cut inside", "cut between"])
def test_what_a_damaged_tar_has_lost_is_said(damage, mode, tmp_path):
    whole = bytearray(write_tar(tmp_path / "whole.tar", [(f"{i:02d}.png", encoded(i)) for i in range(20)]).read_bytes())
    with tarfile.open(tmp_path / "whole.tar") as archive:
        header = archive.getmembers()[5].offset
    if damage == "flip":
        whole[header + 3] ^= 1
    else:
        del whole[header + (100 if damage == "cut inside" else 0) :]
    import gzip

    path = tmp_path / "pile.tar"
    path.write_bytes(gzip.compress(bytes(whole)) if mode == "w:gz" else bytes(whole))
    manifest = manifest_of(path)
    assert manifest["count"] == 5 and "damaged after 5 images" in manifest["refused"][-1][1]


def test_classes_beside_images_whose_names_have_dots(tmp_path):
    files = [(f"photo.2021.{i:02d}{end}", content) for i in range(40)
             for end, content in ((".png", encoded(i)), (".cls", str(i % 4).encode()))]  # fmt: skip
    assert classes_of(write_tar(tmp_path / "a.tar", files)) == {i: str(i % 4) for i in range(40)}
    files = [
        ("s1.seg.png", encoded(1)),
        ("s1.CLS", b"x"),
        ("s1.png", encoded(2)),
        ("s2.png", encoded(3)),
        ("s2.cls", b"y"),
    ]
    assert classes_of(write_tar(tmp_path / "b.tar", files)) == {1: "x", 2: "x", 3: "y"}


def test_a_sparse_member_is_read_as_it_is_meant(tmp_path):
    content = bytearray(encoded(200, "BMP"))
    picture = bytearray(2 << 20)
    picture[: len(content)] = content
    with (tmp_path / "0.bmp").open("wb") as file:
        file.write(content)
        file.truncate(len(picture))
        file.seek((1 << 20) + 4096)
        file.write(b"tail")
    done = subprocess.run(["tar", "-S", "-cf", "x.tar", "0.bmp"], cwd=tmp_path)
    assert done.returncode == 0
    assert load_images(data(tmp_path / "x.tar")).pixels[0, 0].unique().tolist() == [200]


@pytest.mark.parametrize("size", [-100, -512, 2**40])
def test_members_of_impossible_sizes(size, tmp_path):
    path = write_tar(tmp_path / "a.tar", [("0.png", encoded(1)), ("1.png", encoded(2))])
    whole = bytearray(path.read_bytes())
    with tarfile.open(path) as archive:
        at = archive.getmembers()[1].offset
    whole[at + 124 : at + 136] = (
        struct.pack(">12s", (size % 2**96).to_bytes(12, "big"))
        if size >= 0
        else b"\xff" + ((size % 2**88).to_bytes(11, "big"))
    )
    whole[at + 124] |= 0x80
    header = bytes(whole[at : at + 148]) + b" " * 8 + bytes(whole[at + 156 : at + 512])
    whole[at + 148 : at + 156] = b"%06o\0 " % sum(header)
    path.write_bytes(whole)
    begun = time.monotonic()
    manifest = manifest_of(path)
    assert manifest["count"] == 1 and manifest["refused"] and time.monotonic() - begun < 20


def test_many_headers_before_a_member(tmp_path):
    block = tarfile.TarInfo("x")
    block.type, block.size = tarfile.XHDTYPE, 0
    one = block.tobuf(tarfile.USTAR_FORMAT)
    good = write_tar(tmp_path / "a.tar", [("0.png", encoded(1))]).read_bytes()
    (tmp_path / "b.tar").write_bytes(good[: 512 + 512] + one * 3000 + good)
    assert manifest_of(tmp_path / "b.tar")["count"] == 1


# --- zips


def test_a_zip_that_was_replaced_is_read_again(tmp_path):
    path = tmp_path / "x.zip"
    for value in (10, 200):
        with zipfile.ZipFile(tmp_path / "new", "w") as archive:
            archive.writestr("a.bmp", encoded(value, "BMP"))
        os.replace(tmp_path / "new", path)
        assert load_images(data(path)).pixels[0, 0, 0, 0] == value


def test_of_two_members_of_one_name_the_first_is_used(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a/0.png", encoded(1))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a/0.png", encoded(99))
    assert classes_of(tmp_path / "x.zip") == {1: "a"}


def test_names_in_archives(tmp_path):
    names = ["a\\1.png", "./b/2.png", ".//c/3.png", "__MACOSX/._4.png", ".thumbs/5.png", "d/.6.png"]
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for i, name in enumerate(names, start=1):
            archive.writestr(zipfile.ZipInfo(name), encoded(i))
    assert classes_of(tmp_path / "x.zip") == {1: "a", 2: "b", 3: "c"}


def test_links_to_folders_are_listed(tmp_path):
    (tmp_path / "pile" / "a").mkdir(parents=True)
    (tmp_path / "pile" / "a" / "0.png").write_bytes(encoded(1))
    (tmp_path / "pile" / "b").symlink_to(tmp_path / "pile" / "a")
    assert manifest_of(tmp_path / "pile")["refused"] == [["b/", "a link to a folder, which is not followed"]]


def test_the_order_of_classes():
    assert sort_labels(dict.fromkeys(["10", "2", "", "-1"], 0)) == ["", "-1", "2", "10"]
    assert sort_labels(dict.fromkeys(["b10", "b2", "a"], 0)) == ["a", "b10", "b2"]
    assert sort_labels(dict.fromkeys(["1" * 5000, "2"], 0)) == ["1" * 5000, "2"]


# --- pixels


@pytest.mark.parametrize(
    ("values", "mode", "expected"),
    [
        (np.full((8, 8), 200, np.uint16), "PNG", 1),
        (np.full((8, 8), 255, np.uint16), "TIFF", 1),
        (np.full((8, 8), 65535, np.uint16), "PNG", 255),
        (np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8), "TIFF", 255),
        (np.full((8, 8), 77, np.float32), "TIFF", 77),
    ],
)
def test_deep_grey(values, mode, expected):
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, mode)
    target = Target(size=8, channels=1, fit="crop", background=255)
    assert decode(buffer.getvalue(), target).max() == expected


def test_a_very_thin_image_leaves_a_line():
    buffer = io.BytesIO()
    Image.new("L", (20_000, 3), 0).save(buffer, "PNG")
    padded = decode(buffer.getvalue(), Target(size=64, channels=1, fit="pad", background=255))
    assert padded.min() == 0 and (padded == 0).sum() == 64


# --- processes


def test_also_a_small_pile_survives_a_crash_of_the_decoder(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nimport ict.data.decode as d\nold = d.decode_planes\n"
        "d.decode_planes = lambda data, t: os.kill(os.getpid(), 11) if data == b'crash' else old(data, t)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(workers.__file__).parents[2]}")
    (tmp_path / "pile").mkdir()
    for i in range(5):
        (tmp_path / "pile" / f"{i}.png").write_bytes(b"crash" if i == 2 else encoded(i))
    manifest = manifest_of(tmp_path / "pile")
    assert manifest["count"] == 4 and "crashed on it (SIGSEGV)" in manifest["refused"][0][1]


# --- arrays


def array_file(path: Path, shape: tuple, content: bytes = b"") -> Path:
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        file.write(content)
    return path


@pytest.mark.parametrize("shape", [(1, 10**6, 10**6, 3), (10**12, 0, 0, 3), (0, 8, 8, 3), (10**9, 8, 8, 3)])
def test_shapes_that_a_file_cannot_hold(shape, tmp_path):
    with pytest.raises(ConfigError, match=r"damaged|not known"):
        load_images(data(array_file(tmp_path / "a.npy", shape)))


def test_arrays_that_unpack_to_far_more(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", images=np.zeros((2000, 64, 64, 3), np.uint8))
    with pytest.raises(ConfigError, match=r"unpacks to .* times"):
        load_images(data(tmp_path / "a.npz"))


def test_one_file_as_two_sources_makes_two_sets(tmp_path):
    np.savez(tmp_path / "val_data.npz", data=np.zeros((2, 64, 64, 3), np.uint8), labels=[999, 1000])
    as_path = load_images(data(tmp_path / "val_data.npz", image_size=64))
    named = load_images(data("imagenet64", path=str(tmp_path), split="val", image_size=64))
    assert as_path.class_names == ("999", "1000") and named.labels.tolist() == [998, 999]


# --- pickles


def test_pickles_that_would_take_forever_or_everything():
    deep = b"\x80\x02}(K\x01\x85q\x00"  # a dict with a key (((1,), (1,)), …): 2^60 numbers to hash
    for i in range(60):
        deep += b"h%ch%c\x86q%c" % (i, i, i + 1)
    with pytest.raises(NotPlain, match="keys are not texts"):
        read_plain(deep + b"K\x01u.")
    text = b"x" * 2_000_000  # turned into bytes 2,000 times: 4 GB, if it were done
    program = b"\x80\x02c_codecs\nencode\nq\x00X" + struct.pack("<I", len(text)) + text + b"q\x01"
    program += b"X\x06\x00\x00\x00latin1q\x02\x87]q\x03(" + b"h\x00h\x01h\x02\x86R" * 2000 + b"e\x86."
    _, found = read_plain(program)
    assert len(found) == 2000 and all(isinstance(one, Call) for one in found)


# --- what a person sees


def test_inspecting_names_that_look_like_markup(tmp_path):
    from rich.console import Console

    from ict.info import describe_images

    (tmp_path / "pile" / "set [").mkdir(parents=True)
    (tmp_path / "pile" / "set [" / "a].png").write_bytes(b"text")
    (tmp_path / "pile" / "photo[copy]\x1b[31m.png").write_bytes(b"text")
    for i in range(30):
        (tmp_path / "pile" / f"c{i:02d}").mkdir()
        (tmp_path / "pile" / f"c{i:02d}" / "0.png").write_bytes(encoded(7 * i))
    console = Console(file=io.StringIO(), width=200)
    console.print(describe_images("pile", inspect(data(tmp_path / "pile"))))
    shown = console.file.getvalue()
    assert "set [/a].png" in shown and r"photo[copy]\x1b[31m.png" in shown and "\x1b[31m" not in shown
    assert "30: c00 1, c01 1" in shown and "c25" not in shown


def test_a_set_with_nothing_in_it_to_learn(tmp_path):
    np.save(tmp_path / "a.npy", np.full((5, 8, 8, 3), 9, np.uint8))
    assert "hardly anything to learn" in (inspect(data(tmp_path / "a.npy")).warning or "")


def test_a_pipe_as_a_source_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pile.tar")
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        load_images(data(tmp_path / "pile.tar"))


def test_a_hugging_face_folder_of_plain_files(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for label in ("cat", "dog"):
        (tmp_path / "set" / label).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "set" / label / f"{i}.png").write_bytes(encoded(i + 10 * (label == "dog")))
    assert classes_of(f"hf:{tmp_path}/set") == {0: "cat", 1: "cat", 2: "cat", 10: "dog", 11: "dog", 12: "dog"}
