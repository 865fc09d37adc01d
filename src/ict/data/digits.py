"""Handwritten digits: 1,797 grey images of 8×8 pixels in ten classes.

The set is the test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, UCI Machine Learning
Repository, CC BY 4.0), as in scikit-learn's `load_digits`. It is small enough to travel with the package.
"""

from importlib import resources

import numpy as np
import torch

from ict.config import DataConfig
from ict.data.images import Images
from ict.reading import require


def load_digits(config: DataConfig) -> Images:
    require(config.split == "train", f"data.split = {config.split!r}: the digits are not divided; leave it out")
    with resources.files("ict.data").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        inks, labels = stored["inks"], stored["labels"]  # inks from 0 to 16
    pixels = np.rint(inks * (255 / 16)).astype(np.uint8)
    return Images(
        pixels=torch.from_numpy(pixels)[:, None],
        labels=torch.from_numpy(labels.astype(np.int64)),
        class_names=tuple("0123456789"),
    )
