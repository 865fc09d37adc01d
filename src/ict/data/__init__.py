"""Images to learn from: sources, the one decoder, the cache of decoded sets, and the order a run sees them in."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ict.data.images import Images
    from ict.data.sampler import batch_indices, flip_mask
    from ict.data.sources import SOURCES, load_images

__all__ = ["SOURCES", "Images", "batch_indices", "flip_mask", "load_images"]

_HOMES = {
    "SOURCES": "sources",
    "Images": "images",
    "batch_indices": "sampler",
    "flip_mask": "sampler",
    "load_images": "sources",
}


def __getattr__(name: str) -> Any:
    """Names are imported when first used, so that a process that only decodes does not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ict.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ict.data.{_HOMES[name]}"), name)
