"""ImageNet downsampled to 64×64: the official npz batches, each with `data` [n, 12288] and `labels` from 1 to 1000."""

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
    parts = [read_batch(path) for path in paths]
    return Images(
        pixels=torch.from_numpy(np.concatenate([pixels for pixels, _ in parts])),
        labels=torch.from_numpy(np.concatenate([labels for _, labels in parts])),
        class_names=tuple(str(i) for i in range(1, 1001)),
    )


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [n, 3, 64, 64] and class numbers from 0 of one file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            pixels, labels = file["data"], np.asarray(file["labels"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is damaged or not a batch of ImageNet 64×64 ({error})") from error
    fits = pixels.dtype == np.uint8 and pixels.shape == (len(labels), 3 * 64 * 64) and len(labels) > 0
    require(
        fits and labels.min() >= 1 and labels.max() <= 1000,
        f"{path} is not a batch of ImageNet 64×64: it needs uint8 data [n, 12288] and labels from 1 to 1000",
    )
    return pixels.reshape(-1, 3, 64, 64), labels.astype(np.int64) - 1
