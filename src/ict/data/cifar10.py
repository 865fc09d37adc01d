"""CIFAR-10 in its official binary layout: five files of 10,000 records, each a label and 3×32×32 pixels."""

from pathlib import Path

import numpy as np
import torch

from ict.config import ConfigError, DataConfig
from ict.data.images import Images

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORD = 1 + 3 * 32 * 32
RECORDS = 10_000  # in a file


def load_cifar10(config: DataConfig) -> Images:
    """The 50,000 training images in the folder `data.path`."""
    folder = Path(config.path or "cifar-10-batches-bin")
    records = [read_batch(folder / f"data_batch_{i}.bin") for i in range(1, 6)]
    data = np.concatenate(records)
    return Images(
        pixels=torch.from_numpy(data[:, 1:].reshape(-1, 3, 32, 32).copy()),
        labels=torch.from_numpy(data[:, 0].astype(np.int64)),
        class_names=CLASSES,
    )


def read_batch(path: Path) -> np.ndarray:
    """Records of one file -> uint8 [n, 3073]."""
    if not path.is_file():
        raise ConfigError(
            f"{path} is not there: set data.path to the folder of CIFAR-10's binary version "
            "(cifar-10-batches-bin, with data_batch_1.bin to data_batch_5.bin)"
        )
    data = np.fromfile(path, dtype=np.uint8)
    if len(data) != RECORDS * RECORD or data[::RECORD].max() >= len(CLASSES):
        raise ConfigError(f"{path} is damaged: it does not hold {RECORDS:,} records of {RECORD} bytes, labels 0 to 9")
    return data.reshape(-1, RECORD)
