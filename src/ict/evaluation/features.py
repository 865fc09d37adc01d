"""What images are compared by. A feature net is a function `(uint8 images) -> (features, logits or None)`.

Only scores from Inception's features carry the names FID, KID and IS; others are called FD and KD, with the net's name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ict.evaluation.inception import DIMENSION, find_weights, load_inception
from ict.files import sha256
from ict.reading import ConfigError, choose, require


@dataclass(frozen=True, kw_only=True)
class FeatureNet:
    """A net that images are looked at with."""

    name: str
    dimension: int
    checksum: str  # of its weights
    classes: bool  # whether it also gives logits
    device: torch.device
    net: Callable[[Tensor], tuple[Tensor, Tensor | None]]

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """uint8 [n, C, H, W] -> float32 [n, d], and logits [n, classes] where there are."""
        assert pixels.dtype == torch.uint8
        features, logits = self.net(pixels.to(self.device))
        return features.float(), logits

    @property
    def frechet(self) -> str:
        return "FID" if self.name == "inception" else f"FD-{self.name}"

    @property
    def kernel(self) -> str:
        return "KID" if self.name == "inception" else f"KD-{self.name}"


def colours(pixels: Tensor) -> Tensor:
    """Three channels; grey ones three times."""
    return pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels


def inception(weights: Path | None, device: torch.device) -> FeatureNet:
    """The Inception of FID, from a file or the cache."""
    net, checksum = load_inception(find_weights(weights))
    net = net.to(device).to(memory_format=torch.channels_last)  # type: ignore
    return FeatureNet(
        name="inception", dimension=DIMENSION, checksum=checksum, classes=net.fc is not None, device=device,
        net=lambda pixels: net(colours(pixels)),
    )  # fmt: skip


def digits(weights: Path | None, device: torch.device) -> FeatureNet:
    """A reader of 8×8 digits that comes with the package: two convolutions and 64 features.

    Fitted to the first 1,200 of the digits, it reads 98.3 % of the other 597.
    """
    require(weights is None, "--weights is for other features: the digits' come with the package")
    data = resources.files("ict.evaluation").joinpath("digits.npz").read_bytes()
    with resources.files("ict.evaluation").joinpath("digits.npz").open("rb") as file:
        w = {key: torch.from_numpy(value.astype(np.float32)).to(device) for key, value in np.load(file).items()}

    def net(pixels: Tensor) -> tuple[Tensor, Tensor]:
        require(
            pixels.shape[1:] == (1, 8, 8),
            f"the features of digits are for grey images of 8×8 pixels, not {list(pixels.shape[1:])}: use another net",
        )
        x = pixels.float() / 127.5 - 1
        x = F.relu(F.conv2d(x, w["convolution_1_weight"], w["convolution_1_bias"], padding=1))
        x = F.relu(F.conv2d(x, w["convolution_2_weight"], w["convolution_2_bias"], padding=1, stride=2))
        features = F.relu(F.linear(x.flatten(1), w["hidden_weight"], w["hidden_bias"]))
        return features, F.linear(features, w["classes_weight"], w["classes_bias"])

    return FeatureNet(name="digits", dimension=64, checksum=sha256(data), classes=True, device=device, net=net)


def points(weights: Path | None, device: torch.device) -> FeatureNet:
    """Points of the plane as they are: their two coordinates."""
    require(weights is None, "--weights is for nets that have some; points are compared as they are")

    def net(pixels: Tensor) -> tuple[Tensor, None]:
        require(
            tuple(pixels.shape[1:]) == (2, 1, 1),
            f"the features called points are for points of the plane, not {list(pixels.shape[1:])}: use another net",
        )
        return pixels.flatten(1).float() / 127.5 - 1, None

    return FeatureNet(name="points", dimension=2, checksum="none", classes=False, device=device, net=net)


def dinov2(weights: Path | None, device: torch.device) -> FeatureNet:
    """DINOv2 from a folder that the transformers library has saved; nothing is downloaded."""
    require(weights is not None, "--features dinov2 needs --weights: a folder with config.json and model.safetensors")
    assert weights is not None
    try:
        from transformers import Dinov2Model  # type: ignore
    except ImportError as error:
        raise ConfigError("--features dinov2 needs the transformers library: pip install transformers") from error
    file = weights / "model.safetensors"
    require(file.is_file(), f"{weights} holds no model.safetensors of a DINOv2")
    net = Dinov2Model.from_pretrained(weights, local_files_only=True, use_safetensors=True).to(device).eval()
    mean = torch.tensor([0.485, 0.456, 0.406], device=device).view(3, 1, 1)
    deviation = torch.tensor([0.229, 0.224, 0.225], device=device).view(3, 1, 1)

    def look(pixels: Tensor) -> tuple[Tensor, None]:
        x = F.interpolate(colours(pixels).float() / 255, (224, 224), mode="bicubic", antialias=True)
        return net((x.clamp(0, 1) - mean) / deviation).last_hidden_state[:, 0], None

    return FeatureNet(
        name="dinov2", dimension=net.config.hidden_size, checksum=sha256(file.read_bytes()), classes=False,
        device=device, net=look,
    )  # fmt: skip


FEATURES: dict[str, Callable[[Path | None, torch.device], FeatureNet]] = {
    "inception": inception,
    "digits": digits,
    "points": points,
    "dinov2": dinov2,
}


def open_features(name: str, *, weights: Path | None, device: torch.device) -> FeatureNet:
    """A feature net by its name."""
    return choose("--features", name, FEATURES)(weights, device)


def usual_features(source: str) -> str:
    """Inception, except for the digits and points, which it cannot see."""
    return {"digits": "digits", "mixture2d": "points"}.get(source, "inception")
