"""Networks F(x, c_noise, label, key) and the dict that maps the name used in a recipe to the one that builds them."""

from collections.abc import Callable

from torch import nn

from ict.config import NetConfig
from ict.nets.adm import ADM
from ict.nets.mlp import MLP
from ict.nets.ncsnpp import NCSNpp
from ict.nets.unet import UNet
from ict.reading import choose

# (config, *, image_size, channels, classes) -> module; classes = 0 means no labels
NETS: dict[str, Callable[..., nn.Module]] = {"unet": UNet, "ncsnpp": NCSNpp, "adm": ADM, "mlp": MLP}


def build_net(config: NetConfig, *, image_size: int, channels: int, classes: int) -> nn.Module:
    return choose("net.kind", config.kind, NETS)(config, image_size=image_size, channels=channels, classes=classes)
