"""Where images come from. A source is a function `(config) -> Images`; a recipe names its entry here, or gives a path."""

from collections.abc import Callable
from pathlib import Path

from ict.config import ConfigError, DataConfig, choose
from ict.data.cifar10 import load_cifar10
from ict.data.digits import load_digits
from ict.data.imagenet64 import load_imagenet64
from ict.data.images import Images
from ict.data.prepare import Progress, load_pile

SOURCES: dict[str, Callable[[DataConfig], Images]] = {
    "digits": load_digits,
    "cifar10": load_cifar10,
    "imagenet64": load_imagenet64,
}


def load_images(config: DataConfig, progress: Progress | None = None) -> Images:
    """The images that a recipe asks for, checked against the shape it announces."""
    if is_path(config.source):
        images = load_pile(config, progress)
    else:
        images = choose("data.source", config.source, SOURCES)(config)
    expected = (config.channels, config.image_size, config.image_size)
    if images.shape != expected:
        raise ConfigError(
            f"data.source = {config.source!r} has images of {images.describe()}: set data.image_size = "
            f"{images.shape[1]} and data.channels = {images.shape[0]}"
        )
    if config.classes not in (0, len(images.class_names)):
        raise ConfigError(
            f"data.classes = {config.classes}, but {config.source!r} has {len(images.class_names)} classes: set that "
            "number, or 0 for a model without classes"
        )
    return images


def is_path(source: str) -> bool:
    """Whether a source is given by where it is, not by its name."""
    return source not in SOURCES and (any(sign in source for sign in "/\\.*{~") or Path(source).exists())
