"""Where images come from. A source `(config) -> Images | Pile` gives a set, or a pile that is decoded once and kept.

A recipe names an entry of the dict, or gives a path or the name of a Hugging Face set.
"""

import glob
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ict.config import DataConfig
from ict.data.archives import Tar, Zip
from ict.data.arrays import Array
from ict.data.cifar10 import is_cifar10, load_cifar10
from ict.data.decode import ENDINGS
from ict.data.digits import load_digits
from ict.data.huggingface import PREFIX, HubSet
from ict.data.imagenet64 import open_imagenet64
from ict.data.images import Images
from ict.data.mixture2d import load_mixture2d
from ict.data.pile import Folder, Part, Pile, is_zip
from ict.data.prepare import Progress, open_prepared, prepare
from ict.reading import ConfigError, require, suggest

SOURCES: dict[str, Callable[[DataConfig], Images | Pile]] = {
    "digits": load_digits,
    "mixture2d": load_mixture2d,
    "cifar10": load_cifar10,
    "imagenet64": open_imagenet64,
}


def load_images(config: DataConfig, progress: Progress | None = None) -> Images:
    """The images that a recipe asks for, checked against the shape it announces."""
    found = open_source(config)
    images = found if isinstance(found, Images) else open_prepared(prepare(found, config, progress))
    expected = (config.channels, config.image_size, config.image_size)
    if images.shape != expected:
        raise ConfigError(
            f"data.source = {config.source!r} has images of {images.describe()}: set data.image_size = "
            f"{images.shape[1]} and data.channels = {images.shape[0]}"
        )
    if config.classes not in (0, len(images.class_names)):
        raise ConfigError(
            f"data.classes = {config.classes}, but {config.source!r} has {len(images.class_names)} classes"
            f"{stray(images)}: set that number, or 0 for a model without classes"
        )
    return images


def stray(images: Images) -> str:
    """Images beside the folders of classes are a class of their own."""
    alone = "" in images.class_names and len(images.class_names) > 1
    return " (images that are in no folder count as one; move them into one, or away)" if alone else ""


def open_source(config: DataConfig) -> Images | Pile:
    """What a recipe's source means."""
    source = config.source
    if source.startswith(PREFIX):
        rows = HubSet.open(source, config.split)
        return Pile(source=source, parts=[rows], classes=rows.classes)
    if is_path(source):
        if is_cifar10(Path(source).expanduser()):
            return load_cifar10(replace(config, path=source))
        require(config.split == "train", f"data.split = {config.split!r}: {source} is not divided; leave it out")
        return Pile(source=source, parts=[open_part(path) for path in expand(source)])
    require(
        source in SOURCES,
        f"data.source = {source!r}: there is no {source}, and no set of that name{suggest(source, SOURCES)}; "
        f"give a path, hf:owner/name, or one of {', '.join(SOURCES)}",
    )
    return SOURCES[source](config)


def is_path(source: str) -> bool:
    """Whether a source is given by where it is, not by its name."""
    return source not in SOURCES and (any(sign in source for sign in "/\\.*{~") or Path(source).exists())


def open_part(path: Path) -> Part:
    if path.is_dir():
        return Folder(root=path)
    if is_zip(path):
        return Zip(path=path)
    require(path.suffix.lower() not in ENDINGS, f"data.source: {path} is one image: give the folder that it is in")
    return Array(path=path) if path.suffix.lower() in (".npy", ".npz") else Tar(path=path)


def expand(source: str) -> list[Path]:
    """Paths that a source means; {000..127} counts, * matches."""
    counted = re.search(r"\{(\d+)\.\.(\d+)\}", source)
    if counted:
        first, last, width = int(counted[1]), int(counted[2]), len(counted[1])
        names = [source.replace(counted[0], f"{i:0{width}d}") for i in range(first, last + 1)]
    elif any(sign in source for sign in "*?") and not Path(source).expanduser().exists():
        names = sorted(glob.glob(os.path.expanduser(source)))
    else:
        names = [source]
    paths = [Path(name).expanduser() for name in names]
    missing = [path for path in paths if not path.exists()]
    odd = [path for path in paths if path not in missing and not path.is_dir() and not path.is_file()]
    require(not odd, f"data.source: {odd[0] if odd else ''} is neither a file nor a folder")
    if missing or not paths:
        raise ConfigError(
            f"data.source: there is no {missing[0] if missing else source}; set data.source to a folder or an archive "
            "of images"
        )
    return paths
