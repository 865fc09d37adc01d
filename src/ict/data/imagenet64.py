"""ImageNet downsampled to 64×64: the official npz batches, each with `data` [n, 12288] and `labels` from 1 to 1000."""

from pathlib import Path

import numpy as np

from ict.config import DataConfig
from ict.data.arrays import Array
from ict.data.pile import Pile
from ict.reading import require

FILES = {"train": "train_data_batch_*.npz", "val": "val_data.npz"}
# Names that cannot be taken for class numbers, which count from 0.
CLASSES = tuple(f"class {i}" for i in range(1, 1001))


def open_imagenet64(config: DataConfig) -> Pile:
    """The batches in the folder `data.path`."""
    require(config.split in FILES, f"data.split = {config.split!r}: imagenet64 has train and val")
    folder = Path(config.path or "imagenet64").expanduser()
    paths = sorted(folder.glob(FILES[config.split]), key=lambda path: (len(path.name), path.name))  # 2 before 10
    require(
        bool(paths),
        f"{folder} holds no {FILES[config.split]}: set data.path to the folder of the downsampled ImageNet (64×64)",
    )
    return Pile(source=str(folder), parts=[Batch(path=path, planes=(3, 64, 64)) for path in paths], classes=CLASSES)


class Batch(Array):
    """One of the official files."""

    def labels(self) -> np.ndarray:
        labels = super().labels()
        require(
            labels is not None
            and labels.dtype.kind in "iu"
            and len(labels) > 0
            and 1 <= labels.min() <= labels.max() <= 1000,
            f"{self.path} is not a batch of ImageNet 64×64: it needs labels [n], whole numbers from 1 to 1000",
        )
        assert labels is not None
        return np.array(CLASSES)[labels - 1]
