"""Images to learn from. A source is a function `(config) -> Images`; a recipe names it by its entry here."""

from collections.abc import Callable

from ict.config import ConfigError, DataConfig, choose
from ict.data.cifar10 import load_cifar10
from ict.data.digits import load_digits
from ict.data.imagenet64 import load_imagenet64
from ict.data.images import Images, to_float, to_uint8
from ict.data.sampler import batch_indices, flip_mask

SOURCES: dict[str, Callable[[DataConfig], Images]] = {
    "digits": load_digits,
    "cifar10": load_cifar10,
    "imagenet64": load_imagenet64,
}


def load_images(config: DataConfig) -> Images:
    """The images that a recipe asks for, checked against the shape it announces."""
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


__all__ = ["SOURCES", "Images", "batch_indices", "flip_mask", "load_images", "to_float", "to_uint8"]
