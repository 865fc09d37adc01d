"""The network that FID is defined on: Inception-v3 as TensorFlow published it on 2015-12-05, in torch.

Each convolution and the batch norm after it are folded into one convolution when the weights are read. What differs
from other Inceptions: averages leave out the padding, the last block takes a maximum where the others average, images
are resized as TensorFlow 1 did (no half-pixel shift), and pixels become (x − 128) / 128.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ict.download import Download, checksum
from ict.files import cache_home
from ict.reading import ConfigError, require

SIZE, DIMENSION = 299, 2048
WEIGHTS = Download(
    url="https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth",
    sha256="6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
    size=95_628_359,
)

# A step of a branch: (name, channels, kernel) with the size kept, or (name, channels, kernel, 2) at every second place
# without padding; the name of a pooling; or a pair of steps side by side.
Step = tuple[str, int, Any] | tuple[str, int, Any, int]
Branch = Sequence[Any]


def block_a(pool: int) -> list[Branch]:
    return [
        [("branch1x1", 64, 1)],
        [("branch5x5_1", 48, 1), ("branch5x5_2", 64, 5)],
        [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3)],
        ["average", ("branch_pool", pool, 1)],
    ]


def block_b() -> list[Branch]:
    return [
        [("branch3x3", 384, 3, 2)],
        [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3, 2)],
        ["halve"],
    ]


def block_c(c: int) -> list[Branch]:
    wide, tall = (1, 7), (7, 1)
    names = [f"branch7x7dbl_{i}" for i in range(1, 6)]
    return [
        [("branch1x1", 192, 1)],
        [("branch7x7_1", c, 1), ("branch7x7_2", c, wide), ("branch7x7_3", 192, tall)],
        list(zip(names, (c, c, c, c, 192), (1, tall, wide, tall, wide), strict=True)),
        ["average", ("branch_pool", 192, 1)],
    ]


def block_d() -> list[Branch]:
    names = [f"branch7x7x3_{i}" for i in range(1, 4)]
    return [
        [("branch3x3_1", 192, 1), ("branch3x3_2", 320, 3, 2)],
        [*zip(names, (192, 192, 192), (1, (1, 7), (7, 1)), strict=True), ("branch7x7x3_4", 192, 3, 2)],
        ["halve"],
    ]


def block_e(pooling: str) -> list[Branch]:
    def fork(name: str) -> list[Step]:
        return [(f"{name}a", 384, (1, 3)), (f"{name}b", 384, (3, 1))]

    return [
        [("branch1x1", 320, 1)],
        [("branch3x3_1", 384, 1), fork("branch3x3_2")],
        [("branch3x3dbl_1", 448, 1), ("branch3x3dbl_2", 384, 3), fork("branch3x3dbl_3")],
        [pooling, ("branch_pool", 192, 1)],
    ]


STEM: list[Any] = [
    ("Conv2d_1a_3x3", 32, 3, 2, 0), ("Conv2d_2a_3x3", 32, 3, 1, 0), ("Conv2d_2b_3x3", 64, 3, 1, 1), "halve",
    ("Conv2d_3b_1x1", 80, 1, 1, 0), ("Conv2d_4a_3x3", 192, 3, 1, 0), "halve",
]  # fmt: skip
BLOCKS: dict[str, tuple[int, list[Branch]]] = {  # channels that come in, and the branches
    "Mixed_5b": (192, block_a(32)),
    "Mixed_5c": (256, block_a(64)),
    "Mixed_5d": (288, block_a(64)),
    "Mixed_6a": (288, block_b()),
    "Mixed_6b": (768, block_c(128)),
    "Mixed_6c": (768, block_c(160)),
    "Mixed_6d": (768, block_c(160)),
    "Mixed_6e": (768, block_c(192)),
    "Mixed_7a": (768, block_d()),
    "Mixed_7b": (1280, block_e("average")),
    "Mixed_7c": (2048, block_e("maximum")),
}


def pool(kind: str, x: Tensor) -> Tensor:
    if kind == "average":
        return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
    return F.max_pool2d(x, 3, stride=1, padding=1) if kind == "maximum" else F.max_pool2d(x, 3, stride=2)


class Block(nn.Module):
    """Branches side by side, their channels one after the other."""

    def __init__(self, channels: int, branches: list[Branch]):
        super().__init__()
        self.branches = branches
        for branch in branches:
            width = channels
            for step in branch:
                if isinstance(step, list):
                    for one in step:
                        self.add_convolution(width, one)
                elif not isinstance(step, str):
                    self.add_convolution(width, step)
                    width = step[1]

    def add_convolution(self, channels: int, step: Step) -> None:
        name, width, kernel, *stride = step
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (0, 0) if stride else (size[0] // 2, size[1] // 2)
        self.add_module(name, nn.Conv2d(channels, width, size, stride=stride[0] if stride else 1, padding=padding))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.follow(branch, x) for branch in self.branches], dim=1)

    def follow(self, branch: Branch, x: Tensor) -> Tensor:
        if branch[0] == "average":  # over pixels, and a 1×1 convolution over channels: the order is free
            layer = getattr(self, branch[1][0])
            return F.relu(pool("average", F.conv2d(x, layer.weight)) + layer.bias.view(-1, 1, 1))
        for step in branch:
            if isinstance(step, str):
                x = pool(step, x)
            elif isinstance(step, list):
                x = torch.cat([convolve(getattr(self, name), x) for name, *_ in step], dim=1)
            else:
                x = convolve(getattr(self, step[0]), x)
        return x


def convolve(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Convolution and ReLU; one kernel where cuDNN has it."""
    if x.is_cuda and torch.version.hip is None and torch.backends.cudnn.enabled:
        return torch.cudnn_convolution_relu(
            x,
            layer.weight,
            layer.bias,
            layer.stride,
            layer.padding,  # type: ignore
            layer.dilation,
            layer.groups,
        )
    return F.relu(layer(x))


class Inception(nn.Module):
    """uint8 images -> features [n, 2048], and logits [n, 1008] where the weights have a classifier."""

    def __init__(self, *, classifier: bool):
        super().__init__()
        width = 3
        for step in STEM:
            if not isinstance(step, str):
                name, channels, kernel, stride, padding = step
                self.add_module(name, nn.Conv2d(width, channels, kernel, stride=stride, padding=padding))
                width = channels
        for name, (channels, branches) in BLOCKS.items():
            self.add_module(name, Block(channels, branches))
        self.fc = nn.Linear(DIMENSION, 1008, bias=False) if classifier else None  # the score is defined without a bias

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        x = (resize(pixels.float(), SIZE) - 128) / 128
        x = x.contiguous(memory_format=torch.channels_last)
        for step in STEM:
            x = pool(step, x) if isinstance(step, str) else convolve(getattr(self, step[0]), x)
        for name in BLOCKS:
            x = getattr(self, name)(x)
        features = x.mean(dim=(2, 3))
        return features, None if self.fc is None else self.fc(features)


def resize(x: Tensor, size: int) -> Tensor:
    """Bilinear, as TensorFlow 1 did: place i of the result looks at i · (old / new), without a half-pixel shift."""
    for dim in (2, 3):
        old = x.shape[dim]
        places = torch.arange(size, device=x.device, dtype=torch.float32) * torch.tensor(old / size)
        low = places.long()
        high = (low + 1).clamp_max(old - 1)
        share = (places - low).view(-1, *[1] * (3 - dim))
        first = x.index_select(dim, low)
        x = first + (x.index_select(dim, high) - first) * share
    return x


def find_weights(path: Path | None) -> Path:
    """The file of weights, or what to do to have one."""
    place = path or cache_home() / Path(WEIGHTS.url).name
    require(
        place.is_file(),
        f"the Inception weights are not at {place}: bring them by `ict data get inception`, or fetch {WEIGHTS.url} "
        f"({WEIGHTS.size / 1e6:.0f} MB, SHA-256 {WEIGHTS.sha256}) by another way and put it there, or give --inception",
    )
    return place


def load_inception(path: Path) -> tuple[Inception, str]:
    """The net and the checksum of its weights: a state dict by the usual names, with or without a classifier."""
    try:
        if path.suffix == ".safetensors":
            state = safetensors.torch.load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)  # no code is run
        net = Inception(classifier="fc.weight" in state)
        net.load_state_dict(dict(folded(net, state)))
    except Exception as error:  # a stranger's file may do anything to a reader
        advice = "weights_only" in str(error)  # torch's, to trust the file
        reason = type(error).__name__ if advice else repr(error)
        raise ConfigError(
            f"{path} is damaged or does not hold the weights of this Inception ({reason}): bring them by "
            "`ict data get inception`"
        ) from error
    return net.eval().requires_grad_(False), checksum(path)


def folded(net: Inception, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Weights of convolutions with their batch norms (ε = 0.001) worked in."""
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d):
            gain, bias, mean, variance = (
                state[f"{name}.bn.{key}"].double() for key in ("weight", "bias", "running_mean", "running_var")
            )
            scale = gain / (variance + 0.001).sqrt()
            yield f"{name}.weight", (state[f"{name}.conv.weight"].double() * scale[:, None, None, None]).float()
            yield f"{name}.bias", (bias - mean * scale).float()
    if net.fc is not None:
        yield "fc.weight", state["fc.weight"].float()
