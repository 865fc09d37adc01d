"""LPIPS (Zhang et al., 2018): how different two images look to a classifier. The metric of consistency models in 2023.

Images are resized to 224 pixels as that code did, and go through the convolutions of VGG16 or AlexNet. The answers of
five layers are made unit vectors over the channels; their squared differences, weighted by channel, are averaged over
the pixels.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ict.config import ConfigError, require
from ict.files import cache_home

SIZE = 224
Layer = tuple[int, int, bool]  # number in torchvision's net, channels, and whether its answer counts

VGG16: list[Layer | None] = [  # None: pooling
    (0, 64, False), (2, 64, True), None, (5, 128, False), (7, 128, True), None,
    (10, 256, False), (12, 256, False), (14, 256, True), None,
    (17, 512, False), (19, 512, False), (21, 512, True), None, (24, 512, False), (26, 512, False), (28, 512, True),
]  # fmt: skip
ALEXNET: list[Layer | None] = [
    (0, 64, True), None, (3, 192, True), None, (6, 384, True), (8, 256, True), (10, 256, True)
]  # fmt: skip
NETS = {"vgg16": (VGG16, 2), "alexnet": (ALEXNET, 3)}  # layers, and the size of their poolings
SHAPES = {0: (11, 4, 2), 3: (5, 1, 2)}  # of AlexNet's first convolutions: kernel, stride, padding


class Lpips(nn.Module):
    """Two batches of images in [-1, 1] -> one distance a pair."""

    shift: Tensor
    scale: Tensor

    def __init__(self, kind: str):
        super().__init__()
        require(kind in NETS, f"objective.lpips_net = {kind!r}: use {' or '.join(NETS)}")
        self.layers, self.pool = NETS[kind]
        self.features, self.seen = nn.ModuleDict(), []
        width = 3
        for number, channels, counts in filter(None, self.layers):
            kernel, stride, padding = SHAPES.get(number, (3, 1, 1)) if kind == "alexnet" else (3, 1, 1)
            self.features[str(number)] = nn.Conv2d(width, channels, kernel, stride=stride, padding=padding)
            width = channels
            if counts:
                setattr(self, f"lin{len(self.seen)}", nn.Conv2d(channels, 1, 1, bias=False))
                self.seen.append(number)
        for name, values in (("shift", (-0.030, -0.088, -0.188)), ("scale", (0.458, 0.448, 0.450))):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)
        self.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(len(x), device=x.device)
        for place, (a, b) in enumerate(zip(self.look(x), self.look(y), strict=True)):
            total = total + getattr(self, f"lin{place}")((a - b).square()).mean(dim=(1, 2, 3))
        return total

    def look(self, x: Tensor) -> list[Tensor]:
        """Unit vectors of the five layers."""
        x = x.float().expand(-1, 3, -1, -1)
        if x.shape[-1] < 256:
            x = F.interpolate(x, size=(SIZE, SIZE), mode="bilinear")
        x, found = (x - self.shift) / self.scale, []
        for layer in self.layers:
            if layer is None:
                x = F.max_pool2d(x, self.pool, stride=2)
                continue
            x = F.relu(self.features[str(layer[0])](x))
            if layer[2]:
                # The root of exactly 0, where no channel answers, would have no gradient.
                found.append(x / (x.square().sum(dim=1, keepdim=True).clamp_min(1e-20).sqrt() + 1e-10))
        return found


@functools.lru_cache(maxsize=4)
def load_lpips(kind: str, weights: str, device: torch.device) -> Lpips:
    """The net with its weights: from a file, or from the cache."""
    net = Lpips(kind)
    path = Path(weights).expanduser() if weights else cache_home() / f"lpips-{kind}.pt"
    require(
        path.is_file(),
        f"the weights of LPIPS are not at {path}: put a file there, or name one in objective.lpips_weights, that holds "
        f"the convolutions of torchvision's {kind} (features.*) and the linear layers of LPIPS v0.1 (lin*.weight)",
    )
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
        found = {
            name.replace(".model.1.", "."): tensor for name, tensor in found.items()
        }  # as the lpips package has it
        net.load_state_dict({name: tensor for name, tensor in found.items() if not name.startswith("classifier.")})
    except Exception as error:
        raise ConfigError(f"{path} does not hold the weights of LPIPS with {kind} ({str(error)[:200]})") from error
    return net.to(device).eval()
