"""Dense layers for data without pixels side by side: points of the plane, as images of one pixel.

x [B, C, 1, 1] ─► dense ─► residual blocks, `blocks` of each width channels · multiplier ─► norm, dense
c_noise [B] ─► embedding, as of the U-Net ─► added inside every block
"""

from torch import Tensor, nn
from torch.nn import functional as F

from ict.config import NetConfig
from ict.nets.dropout import Dropout, number_dropouts
from ict.nets.unet import Embedding
from ict.precision import exact
from ict.reading import require


class Block(nn.Module):
    """x + dense(SiLU(dense(SiLU(norm x)) + embedding)); the last dense layer starts at zero."""

    def __init__(self, inputs: int, outputs: int, embedding: int, *, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(inputs)
        self.first, self.embed = nn.Linear(inputs, outputs), nn.Linear(embedding, outputs)
        self.dropout, self.last = Dropout(dropout), start_at_zero(nn.Linear(outputs, outputs))
        self.path = nn.Identity() if inputs == outputs else nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, embedding: Tensor, key: Tensor | None) -> Tensor:
        with exact(embedding):
            e = self.embed(embedding)
        inner = F.silu(self.first(F.silu(self.norm(x))) + e)
        return self.path(x) + self.last(self.dropout(inner, key))


class MLP(nn.Module):
    """F(x, c_noise, label, key); the last layer starts at zero, so F starts as 0."""

    def __init__(self, config: NetConfig, *, image_size: int, channels: int, classes: int):
        super().__init__()
        require(not config.attention, "net.attention is not for net.kind = mlp: remove it")
        require(
            image_size == 1, f"net.kind = mlp is for points (data.image_size = 1), not for {image_size} pixels a side"
        )
        width, embedding = config.channels, 4 * config.channels
        self.embed = Embedding(config, width=2 * width, classes=classes, start=lambda layer: layer)
        current = config.multipliers[0] * width
        self.dense_in, self.blocks = nn.Linear(channels, current), nn.ModuleList()
        for multiplier in config.multipliers:
            for _ in range(config.blocks):
                self.blocks.append(Block(current, multiplier * width, embedding, dropout=config.dropout_at(1)))
                current = multiplier * width
        self.norm_out, self.dense_out = nn.LayerNorm(current), start_at_zero(nn.Linear(current, channels))
        number_dropouts(self)

    def forward(self, x: Tensor, c_noise: Tensor, label: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        embedding, inner = self.embed(c_noise, label), self.dense_in(x.flatten(1))
        for block in self.blocks:
            inner = block(inner, embedding, key)
        return self.dense_out(F.silu(self.norm_out(inner))).reshape(x.shape)


def start_at_zero(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
