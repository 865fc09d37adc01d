"""CIFAR-10 in its official forms: binary batches, python batches (never unpickled), and the .tar.gz of either."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ict.config import DataConfig
from ict.data.archives import compression, read_member
from ict.data.images import Images
from ict.data.plainpickle import NotPlain, as_array, read_plain
from ict.download import Download, checksum
from ict.files import cache_home, sha256, write_atomically
from ict.reading import ConfigError, require

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXELS = 3 * 32 * 32
RECORD = 1 + PIXELS
RECORDS = 10_000  # in a batch
MAX_BATCH = 64 << 20  # bytes
BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
FOLDERS = {"cifar-10-batches-bin": ".bin", "cifar-10-batches-py": ""}  # and the ending of a batch
BESIDE = {"batches.meta", "batches.meta.txt", "readme.html"}  # what else is in them

ARCHIVE = Download(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    size=170_052_171,
)
CHECKSUMS = {
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}


def load_cifar10(config: DataConfig) -> Images:
    """The 50,000 training or 10,000 test images at `data.path`, or those that `ict data get cifar10` has brought."""
    require(config.split in BATCHES, f"data.split = {config.split!r}: cifar10 has train and test")
    path = Path(config.path).expanduser() if config.path else home()
    found = dict(read_batches(path, BATCHES[config.split]))
    missing = [name for name in BATCHES[config.split] if name not in found]
    if missing:
        raise ConfigError(
            f"{path} holds no {missing[0]}: bring CIFAR-10 by `ict data get cifar10`, or set data.path to a folder or "
            "a .tar.gz of its binary or its python version"
        )
    records = np.concatenate([found[name] for name in BATCHES[config.split]])
    return Images(
        pixels=torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).copy()),
        labels=torch.from_numpy(records[:, 0].astype(np.int64)),
        class_names=CLASSES,
    )


def home() -> Path:
    """Where the set is kept once it was brought."""
    return cache_home() / "cifar-10-batches-bin"


def is_home() -> bool:
    """Whether every batch is there and right."""
    places = {name: home() / f"{name}.bin" for name in CHECKSUMS}
    return all(place.is_file() and checksum(place) == CHECKSUMS[name] for name, place in places.items())


def read_batches(path: Path, names: tuple[str, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """Name and records of each of these batches that is there."""
    if path.is_file():
        yield from read_archive(path, names)
        return
    for name in names:
        file = find_batch(path, name)
        if file is not None:
            yield name, parse(file, file.read_bytes() if file.stat().st_size <= MAX_BATCH else b"")


def find_batch(folder: Path, name: str) -> Path | None:
    """A batch in a folder, or in the official folder inside it."""
    places = [folder / f"{name}{ending}" for ending in FOLDERS.values()]
    places += [folder / inside / f"{name}{ending}" for inside, ending in FOLDERS.items()]
    return next((place for place in places if place.is_file()), None)


def is_cifar10(folder: Path) -> bool:
    """Whether a folder holds the training batches of one version, and nothing that is not CIFAR-10's."""
    if not folder.is_dir():
        return False
    there = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}
    versions = (({f"{name}{ending}" for name in names} for names in BATCHES.values()) for ending in FOLDERS.values())
    return any(train <= there <= train | test | BESIDE for train, test in versions)


def read_archive(path: Path, names: tuple[str, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """The batches in a .tar or .tar.gz of either version."""
    endings = set(FOLDERS.values())
    try:
        packed = compression(path)
        with tarfile.open(path, "r|gz" if packed else "r|") as archive:
            for member in archive:
                file = Path(member.name)
                if file.stem in names and file.suffix in endings and member.isreg() and member.size <= MAX_BATCH:
                    yield file.stem, parse(path / file, read_member(archive, member))
    except ConfigError:
        raise
    except Exception as error:  # a damaged archive may throw anything
        raise ConfigError(f"{path} is damaged or not a .tar.gz of CIFAR-10 ({error})") from error


def parse(path: Path, data: bytes) -> np.ndarray:
    """Records of one batch: the class, then three planes of pixels -> uint8 [n, 3073]."""
    try:
        if path.suffix == ".bin":
            records = np.frombuffer(data, dtype=np.uint8).reshape(-1, RECORD)
        else:
            batch = {key if isinstance(key, str) else key.decode(): value for key, value in read_plain(data).items()}
            flat = isinstance(batch["labels"], list) and {type(label) for label in batch["labels"]} == {int}
            labels = np.array(batch["labels"] if flat and len(batch["labels"]) == RECORDS else [], dtype=np.uint8)
            records = np.hstack([labels[:, None], as_array(batch["data"]).reshape(-1, PIXELS)])
        if len(records) != RECORDS or records[:, 0].max() >= len(CLASSES):
            raise ValueError("another number of images, or another class")
    except (ValueError, NotPlain, KeyError, AttributeError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"{path} is damaged: it does not hold {RECORDS:,} images of 32×32 pixels with classes 0 to 9"
        ) from error
    return records


def unpack(archive: Path, folder: Path) -> None:
    """Lay the batches of the official archive into a folder, each checked."""
    names = BATCHES["train"] + BATCHES["test"]
    found = dict(read_archive(archive, names))
    for name in names:
        require(
            name in found and sha256(found[name].tobytes()) == CHECKSUMS[name],
            f"{archive}: {name} is missing or is not the official one",
        )
        write_atomically(folder / f"{name}.bin", found[name].tobytes())
