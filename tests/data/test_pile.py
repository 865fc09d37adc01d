"""Any pile of images in, pixels out: decoding, listing, preparing, and what happens to bad input."""

import contextlib
import errno
import io
import os
import random
import shutil
import tarfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_config
from PIL import Image

import ict.data.decode as decode_module
import ict.data.pile as pile_module
import ict.data.prepare as prepare_module
from ict.config import DataConfig
from ict.data import Images, load_images
from ict.data.decode import Refused, Target, decode
from ict.data.decoding import decode_chunk
from ict.data.inspect import inspect
from ict.data.pile import Pile
from ict.data.prepare import is_prepared, open_prepared, read_manifest
from ict.data.sources import open_source
from ict.reading import ConfigError

COLOUR = Target(size=8, channels=3, fit="crop", background=255)
GREY = Target(size=8, channels=1, fit="crop", background=255)


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def plain(colour=(200, 100, 50), size=(8, 8)) -> Image.Image:
    return Image.new("RGB", size, colour)


def first_pixel(data: bytes, target: Target = COLOUR) -> list[int]:
    return decode(data, target)[:, 0, 0].tolist()


# --- decoding


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "PPM", "WEBP", "GIF", "JPEG", "TGA"])
def test_formats(form):
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(form, {})
    assert decode(encoded(plain(), form, **options), COLOUR).shape == (3, 8, 8)
    assert first_pixel(encoded(plain(), form, **options)) == pytest.approx([200, 100, 50], abs=2)


def test_the_camera_was_turned():
    image = Image.new("RGB", (8, 8), "black")
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # the top of the picture is its right side
    turned = decode(encoded(image, "PNG", exif=exif), GREY)
    assert turned[0, 0, 7] == 255 and turned[0, 0, 0] == 0


@pytest.mark.parametrize(("background", "expected"), [(255, 255), (0, 0), (100, 100)])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparent_pixels_show_the_background(mode, background, expected):
    image = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    image = image.convert("P" if mode == "PA" else mode)
    options = {"transparency": 0} if mode == "PA" else {}
    target = Target(size=8, channels=3, fit="crop", background=background)
    assert first_pixel(encoded(image, "PNG", **options), target) == [expected] * 3


def test_palettes_sixteen_bits_cmyk_and_one_bit():
    assert first_pixel(encoded(plain().convert("P", palette=Image.Palette.ADAPTIVE))) == pytest.approx(
        [200, 100, 50], abs=2
    )
    deep = Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16))
    assert first_pixel(encoded(deep), GREY) == [round(40_000 / 257)]
    cmyk = plain((0, 0, 0)).convert("CMYK")
    assert max(first_pixel(encoded(cmyk, "TIFF"))) < 5
    assert first_pixel(encoded(Image.new("1", (8, 8), 1)), GREY) == [255]
    assert first_pixel(encoded(Image.new("L", (8, 8), 77))) == [77, 77, 77]


def test_the_first_frame_of_an_animation():
    frames = [plain((255, 0, 0)), plain((0, 0, 255))]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert first_pixel(data) == [255, 0, 0]


def test_cropping_and_padding():
    image = Image.new("RGB", (24, 8), "black")
    image.paste((255, 255, 255), (8, 0, 16, 8))
    assert decode(encoded(image), GREY).min() > 240  # the white middle
    padded = decode(encoded(image), Target(size=24, channels=1, fit="pad", background=99))
    assert padded[0, 0, 0] == 99 and padded[0, 12, 12] == 255 and padded[0, 12, 0] == 0


def test_large_images_are_made_small_well():
    """A fine chequerboard becomes grey, not black or white."""
    board = Image.fromarray((np.indices((256, 256)).sum(axis=0) % 2 * 255).astype(np.uint8))
    assert np.abs(decode(encoded(board), GREY).astype(int) - 127).max() < 8


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"hello, I am a text", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (encoded(Image.effect_noise((64, 64), 50))[:600], "cannot be decoded"),
        (encoded(plain(size=(64, 64)), "JPEG")[:300], "cannot be decoded"),
    ],
)
def test_what_is_no_image_is_refused_with_its_reason(data, reason):
    with pytest.raises(Refused, match=reason):
        decode(data, COLOUR)


def test_bombs_are_refused_before_they_are_decoded(monkeypatch):
    bomb = encoded(Image.new("1", (12_000, 12_000)))
    assert len(bomb) < 100_000
    with pytest.raises(Refused, match="12000×12000 pixels"):
        decode(bomb, GREY)
    monkeypatch.setattr(decode_module, "MAX_BYTES", 10)
    with pytest.raises(Refused, match="larger than"):
        decode(encoded(plain()), GREY)


# --- where images lie


def make_folder(root: Path, *, count: int = 3) -> Path:
    for label in ("cats", "dogs"):
        for i in range(count):
            path = root / label / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(plain((i * 20, 100 if label == "cats" else 200, 0))))
    return root


def as_zip(folder: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*.png")):
            archive.write(file, file.relative_to(folder).as_posix())
    return path


def as_tar(folder: Path, path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for file in sorted(folder.rglob("*.png")):
            archive.add(file, file.relative_to(folder).as_posix())
    return path


def prepare(config: DataConfig, progress=None) -> Path:
    pile = open_source(config)
    assert isinstance(pile, Pile)
    return prepare_module.prepare(pile, config, progress)


def data(source, **changes) -> DataConfig:
    return tiny_config(data={"source": str(source), "channels": 3, "classes": 2, **changes}).data


def test_a_folder_a_zip_and_a_tar_give_the_same_pixels(tmp_path):
    folder = make_folder(tmp_path / "pile")
    sources = [folder, as_zip(folder, tmp_path / "pile.zip"), as_tar(folder, tmp_path / "pile.tar")]
    sets = [load_images(data(source)) for source in sources]
    assert sets[0].class_names == ("cats", "dogs") and sets[0].labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert sets[0].pixels[4, :, 0, 0].tolist() == [20, 200, 0]
    for other in sets[1:]:
        assert torch.equal(other.pixels, sets[0].pixels) and torch.equal(other.labels, sets[0].labels)


def test_shards(tmp_path):
    for i in range(3):
        as_tar(make_folder(tmp_path / f"f{i}", count=i + 1), tmp_path / f"shard-{i:03d}.tar")
    assert len(load_images(data(tmp_path / "shard-{000..002}.tar"))) == 2 + 4 + 6
    assert len(load_images(data(tmp_path / "shard-*.tar"))) == 12
    with pytest.raises(ConfigError, match=r"there is no .*shard-003\.tar"):
        load_images(data(tmp_path / "shard-{000..003}.tar"))


def test_the_number_of_classes_must_be_the_folders(tmp_path):
    folder = make_folder(tmp_path / "pile")
    assert len(load_images(data(folder, classes=0))) == 6
    with pytest.raises(ConfigError, match="has 2 classes: set"):
        load_images(data(folder, classes=5))
    one = next(folder.glob("*/*"))
    with pytest.raises(ConfigError, match="is one image: give the folder"):
        load_images(data(one))
    shutil.copy(one, folder)
    with pytest.raises(ConfigError, match=r"has 3 classes \(images that are in no folder count as one"):
        load_images(data(folder, classes=2))


@pytest.mark.parametrize("name", ["nowhere/", "pile.zip", "./x.tar"])
def test_a_source_that_is_not_there(name, tmp_path):
    with pytest.raises(ConfigError, match="there is no"):
        load_images(data(tmp_path / name))


def test_an_empty_or_useless_folder(tmp_path):
    (tmp_path / "pile").mkdir()
    (tmp_path / "pile" / "notes.txt").write_text("no image")
    with pytest.raises(ConfigError, match="no image was found"):
        load_images(data(tmp_path / "pile"))
    (tmp_path / "pile" / "a.png").write_text("no image")
    with pytest.raises(ConfigError, match=r"not one image could be used .*a\.png: not an image"):
        load_images(data(tmp_path / "pile"))


def test_links_out_of_a_folder_are_not_followed(tmp_path):
    folder = make_folder(tmp_path / "pile")
    (tmp_path / "secret.png").write_bytes(encoded(plain()))
    (folder / "cats" / "out.png").symlink_to(tmp_path / "secret.png")
    (folder / "cats" / "in.png").symlink_to(folder / "cats" / "0.png")
    (folder / "cats" / "broken.png").symlink_to(tmp_path / "nothing")
    found = list(open_source(data(folder)).entries())
    assert len([entry for entry, reason in found if reason is None]) == 7
    reasons = {entry.name: reason for entry, reason in found}
    assert "leads out" in reasons["cats/out.png"] and "cannot be read" in reasons["cats/broken.png"]


def hostile_tar(path: Path) -> Path:
    good = encoded(plain())
    with tarfile.open(path, "w") as archive:
        for name in ("../up.png", "/etc/abs.png", "ok/a.png", "ok/a.png", "a/../../b.png"):
            member = tarfile.TarInfo(name)
            member.size = len(good)
            archive.addfile(member, io.BytesIO(good))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE):
            member = tarfile.TarInfo(f"link{kind.decode()}.png")
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    return path


def hostile_zip(path: Path) -> Path:
    good = encoded(plain())
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("../up.png", "/abs.png", "C:\\win.png", "ok/a.png"):
            archive.writestr(name, good)
        archive.writestr("bomb.png", b"\0" * 10_000_000)
        archive.writestr("notes.txt", b"text")
    return path


@pytest.mark.parametrize("make", [hostile_tar, hostile_zip])
def test_hostile_archives(make, tmp_path):
    path = make(tmp_path / f"pile.{make.__name__[-3:]}")
    before = sorted(p for p in tmp_path.rglob("*"))
    folder = prepare(data(path, classes=0))
    manifest = read_manifest(folder)
    assert manifest["count"] == 1 and manifest["classes"] == {"ok": 1}
    assert len(manifest["refused"]) >= 4 and all(reason for _, reason in manifest["refused"])
    outside = [p for p in tmp_path.rglob("*") if p not in before and not p.is_relative_to(tmp_path / "cache")]
    assert outside == []


@pytest.mark.parametrize("name", ["pile.zip", "pile.tar"])
def test_a_damaged_archive(name, tmp_path):
    (tmp_path / name).write_bytes(b"nonsense" * 100)
    with pytest.raises(ConfigError, match="is damaged or not a"):
        load_images(data(tmp_path / name))


# --- preparing


def test_the_second_start_decodes_nothing(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "pile")
    seen = []
    first = prepare(data(folder), lambda done, total: seen.append((done, total)))
    assert seen[-1] == (6, 6)
    monkeypatch.setattr(prepare_module, "decode_all", lambda *_: pytest.fail("decoded again"))
    assert prepare(data(folder)) == first


def test_a_changed_source_or_option_makes_a_new_set(tmp_path):
    folder = make_folder(tmp_path / "pile")
    first = prepare(data(folder))
    assert prepare(data(folder, fit="pad")) != first
    assert prepare(data(folder, image_size=16)) != first
    (folder / "cats" / "9.png").write_bytes(encoded(plain()))
    second = prepare(data(folder))
    assert second != first and len(open_prepared(second)) == 7
    os.utime(folder / "cats" / "9.png", ns=(1, 1))
    assert prepare(data(folder)) != second


def test_the_manifest_tells_everything(tmp_path):
    import hashlib

    folder = make_folder(tmp_path / "pile")
    (folder / "dogs" / "bad.png").write_bytes(b"text")
    place = prepare(data(folder))
    manifest = read_manifest(place)
    assert manifest["count"] == 6 and manifest["classes"] == {"cats": 3, "dogs": 3}
    assert manifest["refused"] == [["dogs/bad.png", "not an image of a known format"]]
    assert manifest["sha256"] == hashlib.sha256((place / "pixels.u8").read_bytes()).hexdigest()
    mapped = open_prepared(place)
    copied = Images(pixels=mapped.pixels.clone(), labels=mapped.labels, class_names=mapped.class_names)
    assert copied.checksum == mapped.checksum


@pytest.mark.parametrize("file", ["pixels.u8", "manifest.json", "labels.npy"])
def test_a_damaged_set_is_made_again(file, tmp_path):
    folder = make_folder(tmp_path / "pile")
    place = prepare(data(folder))
    pixels = open_prepared(place).pixels.clone()
    (place / file).write_bytes((place / file).read_bytes()[:-5])
    assert not is_prepared(place)
    assert torch.equal(load_images(data(folder)).pixels, pixels)


def test_a_full_disk_leaves_nothing_that_is_believed(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "pile")

    def full(path, _data):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "write_new", full)
        with pytest.raises(OSError, match=r"No space left.*ICT_CACHE"):
            prepare(data(folder))
    assert [p for p in (tmp_path / "cache" / "sets").iterdir() if p.suffix != ".lock"] == []
    assert len(load_images(data(folder))) == 6


def test_a_source_that_changes_while_it_is_prepared(tmp_path):
    folder = make_folder(tmp_path / "pile")

    def change(_done, _total):
        (folder / "cats" / "new.png").write_bytes(encoded(plain()))

    with pytest.raises(ConfigError, match="changed while it was being prepared"):
        prepare(data(folder), change)
    assert len(load_images(data(folder))) == 7


def test_two_at_once_make_one_set(tmp_path):
    folder = make_folder(tmp_path / "pile", count=40)
    made, places = [], []
    original = prepare_module.write_pixels

    def counted(*arguments):
        made.append(None)
        return original(*arguments)

    prepare_module.write_pixels = counted
    try:
        threads = [threading.Thread(target=lambda: places.append(prepare(data(folder)))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        prepare_module.write_pixels = original
    assert len(made) == 1 and len(set(places)) == 1 and len(open_prepared(places[0])) == 80


def test_files_without_permission_are_refused_not_fatal(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "pile")

    def guarded(path, *arguments, **options):
        if path.endswith("1.png"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return open(path, *arguments, **options)

    monkeypatch.setattr(pile_module, "open", guarded, raising=False)
    entries = [entry for entry, _ in open_source(data(folder)).entries()]
    outcomes, pixels = decode_chunk(entries, COLOUR)
    assert len(pixels) == 4 * 3 * 8 * 8 and sum("Permission denied" in (reason or "") for _, reason, _ in outcomes) == 2


def test_permissions_that_were_mended_make_a_new_set(tmp_path):
    folder = make_folder(tmp_path / "pile")
    first = prepare(data(folder))
    (folder / "cats" / "0.png").chmod(0o600)
    assert prepare(data(folder)) != first


# --- looking at a set


def test_inspect(tmp_path):
    folder = make_folder(tmp_path / "pile")
    (folder / "cats" / "again.png").write_bytes((folder / "cats" / "0.png").read_bytes())
    (folder / "cats" / "bad.jpg").write_bytes(b"text")
    found = inspect(data(folder))
    assert found.classes == {"cats": 4, "dogs": 3} and found.duplicates == 1
    assert [name for name, _ in found.refused] == ["cats/bad.jpg"]
    x = found.images.pixels.double() / 127.5 - 1
    assert found.mean == pytest.approx(x.mean().item(), abs=1e-6)
    assert found.deviation == pytest.approx(x.std(unbiased=False).item(), abs=1e-6)
    assert found.warning is None


def test_inspect_warns_of_pixels_far_from_sigma_data(tmp_path):
    (tmp_path / "pile").mkdir()
    for i, colour in enumerate(((0, 0, 0), (255, 255, 255))):
        (tmp_path / "pile" / f"{i}.png").write_bytes(encoded(plain(colour)))
    assert "noise.sigma_data = 1.00" in (inspect(data(tmp_path / "pile")).warning or "")


# --- a storm of bad files


def mutated(data: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(6)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 20)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind == 2:
        at = rng.randrange(len(data))
        return data[:at] + rng.randbytes(rng.randint(1, 50)) + data[at:]
    if kind == 3:
        at = rng.randrange(len(data))
        return data[:at] + data[at + rng.randint(1, 30) :]
    if kind == 4:
        return rng.randbytes(rng.randint(0, 300))
    return data[: rng.randrange(8, 64)] + rng.randbytes(100)


def test_five_thousand_broken_images_do_no_harm():
    """Each gives pixels of the right shape or a reason; nothing else may come out."""
    rng = random.Random(0)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8))
    seeds = [encoded(noise, form) for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "TGA")]
    seeds += [encoded(noise.convert("RGBA")), encoded(noise.convert("P")), encoded(noise.convert("CMYK"), "TIFF")]
    outcomes = {"pixels": 0, "refused": 0}
    for _ in range(5000):
        try:
            pixels = decode(mutated(rng.choice(seeds), rng), COLOUR)
            assert pixels.shape == (3, 8, 8) and pixels.dtype == np.uint8
            outcomes["pixels"] += 1
        except Refused as reason:
            outcomes["refused"] += len(str(reason)) > 5
    assert sum(outcomes.values()) == 5000 and min(outcomes.values()) > 300


@pytest.mark.parametrize("make", [as_zip, as_tar])
def test_broken_archives_do_no_harm(make, tmp_path):
    rng = random.Random(0)
    whole = make(make_folder(tmp_path / "pile"), tmp_path / f"whole.{make.__name__[-3:]}").read_bytes()
    path = tmp_path / f"broken.{make.__name__[-3:]}"
    for i in range(150):
        path.write_bytes(mutated(whole, rng))
        os.utime(path, ns=(i, i))
        with contextlib.suppress(ConfigError):  # and nothing else
            assert len(load_images(data(path, classes=0))) >= 1
