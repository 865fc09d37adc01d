"""ImageNet downsampled to 64×64: the official npz batches, each with `data` [n, 12288] and `labels` from 1 to 1000."""

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from ict.config import ConfigError, DataConfig, require
from ict.data.images import Images


def load_imagenet64(config: DataConfig) -> Images:
    """All train_data_batch_*.npz in the folder `data.path`; they are held in memory (15.7 GB for the whole set)."""
    folder = Path(config.path or "imagenet64")
    paths = sorted(folder.glob("train_data_batch_*.npz"))
    require(
        bool(paths),
        f"{folder} holds no train_data_batch_*.npz: set data.path to the folder of the downsampled ImageNet (64×64)",
    )
    labels = [read_labels(path) for path in paths]
    counts = [len(part) for part in labels]
    pixels = np.empty((sum(counts), 3, 64, 64), dtype=np.uint8)  # filled file by file: the whole set is held once
    for path, end, count in zip(paths, np.cumsum(counts), counts, strict=True):
        data = read_array(path, "data")
        require(
            data.dtype == np.uint8 and data.shape == (count, 3 * 64 * 64),
            f"{path} is not a batch of ImageNet 64×64: it needs uint8 data [n, 12288]",
        )
        pixels[end - count : end] = data.reshape(-1, 3, 64, 64)
    # Names that cannot be taken for class numbers, which count from 0.
    names = tuple(f"class {i}" for i in range(1, 1001))
    return Images(pixels=torch.from_numpy(pixels), labels=torch.from_numpy(np.concatenate(labels)), class_names=names)


def read_labels(path: Path) -> np.ndarray:
    """Class numbers from 0 of one file -> int64 [n]."""
    labels = np.asarray(read_array(path, "labels"))
    require(
        labels.ndim == 1
        and labels.dtype.kind in "iu"
        and len(labels) > 0
        and 1 <= labels.min() <= labels.max() <= 1000,
        f"{path} is not a batch of ImageNet 64×64: it needs labels [n], whole numbers from 1 to 1000",
    )
    return labels.astype(np.int64) - 1


def read_array(path: Path, name: str) -> np.ndarray:
    """One array of an npz file; a pickle inside is never opened."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return file[name]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{path} is damaged or not a batch of ImageNet 64×64 ({error})") from error
