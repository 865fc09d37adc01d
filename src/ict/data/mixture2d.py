"""Points of a mixture of Gaussians in the plane (`ict.mixture`), as images of two channels and one pixel.

Like all images they are kept as bytes: each coordinate is rounded to a multiple of 2/255, which moves a point by 0.003.
"""

from ict.config import DataConfig
from ict.data.images import Images
from ict.mixture import MIXTURE
from ict.pixels import to_uint8
from ict.reading import require

COUNT, SEED = 65_536, 2023


def load_mixture2d(config: DataConfig) -> Images:
    require(config.split == "train", f"data.split = {config.split!r}: the mixture is not divided; leave it out")
    points, parts = MIXTURE.draw(COUNT, seed=SEED)
    return Images(pixels=to_uint8(points), labels=parts, class_names=tuple("abcd"))
