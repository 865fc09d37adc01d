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

from ict.download import Download
from ict.files import cache_home
from ict.reading import ConfigError, require

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

TORCHVISION = "https://download.pytorch.org/models"
LINEAR = (
    "https://raw.githubusercontent.com/richzhang/PerceptualSimilarity/082bb24f84c091ea94de2867d34c4544f68e0963"
    "/lpips/weights/v0.1"
)
# The usual public places: torchvision's net, and the linear layers of LPIPS v0.1 for it.
WEIGHTS = {
    "vgg16": (
        Download(
            url=f"{TORCHVISION}/vgg16-397923af.pth",
            sha256="397923af8e79cdbb6a7127f12361acd7a2f83e06b05044ddf496e83de57a5bf0",
            size=553_433_881,
        ),
        Download(
            url=f"{LINEAR}/vgg.pth",
            sha256="a78928a0af1e5f0fcb1f3b9e8f8c3a2a5a3de244d830ad5c1feddc79b8432868",
            size=7_289,
        ),
    ),
    "alexnet": (
        Download(
            url=f"{TORCHVISION}/alexnet-owt-7be5be79.pth",
            sha256="7be5be791159472b1fbf3c69796f7cb30dca7ad8466c2df70058c37116cdee02",
            size=244_408_911,
        ),
        Download(
            url=f"{LINEAR}/alex.pth",
            sha256="df73285e35b22355a2df87cdb6b70b343713b667eddbda73e1977e0c860835c0",
            size=6_009,
        ),
    ),
}


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


def places(kind: str) -> dict[Path, Download]:
    """Where the published files of a net belong in the cache."""
    return {cache_home() / "lpips" / one.url.rpartition("/")[2]: one for one in WEIGHTS[kind]}


def find_weights(kind: str, weights: str) -> list[Path]:
    """The files that hold the weights of a net together: one that was named, or those in the cache."""
    if weights:
        path = Path(weights).expanduser()
        require(path.is_file(), f"objective.lpips_weights: there is no file {path}")
        return [path]
    whole, parts = cache_home() / f"lpips-{kind}.pt", places(kind)
    if whole.is_file():
        return [whole]
    urls = " and ".join(f"{one.url} ({one.size:,} bytes, SHA-256 {one.sha256})" for one in parts.values())
    require(
        all(path.is_file() for path in parts),
        f"the weights of LPIPS are not in the cache ({cache_home()}): bring them by `ict data get lpips-{kind}`, or "
        f"fetch {urls} by another way and put them at {' and '.join(map(str, parts))}, or name in "
        f"objective.lpips_weights a file that holds both (features.* and lin*.weight)",
    )
    return list(parts)


@functools.lru_cache(maxsize=4)
def load_lpips(kind: str, weights: str, device: torch.device) -> Lpips:
    """The net with its weights: from a file, or from the cache."""
    net, found = Lpips(kind), {}
    files = find_weights(kind, weights)
    try:
        for path in files:
            found |= torch.load(path, weights_only=True, map_location="cpu")  # no code is run
        found = {
            name.replace(".model.1.", "."): tensor for name, tensor in found.items()
        }  # as the lpips package has it
        net.load_state_dict({name: tensor for name, tensor in found.items() if not name.startswith("classifier.")})
    except Exception as error:
        shown = " with ".join(map(str, files))
        raise ConfigError(f"{shown} does not hold the weights of LPIPS with {kind} ({str(error)[:200]})") from error
    return net.to(device).eval()
