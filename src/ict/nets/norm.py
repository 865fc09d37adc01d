"""GroupNorm with what stands around it: a sum before it, a scale and a shift by sample, a SiLU and dropout after."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ict.nets.dropout import Dropout
from ict.nets.kernels import kernels_for


class Norm(nn.GroupNorm):
    """y = norm(x + added) · (1 + scale) + shift, then a SiLU and dropout where asked. The three are [C] or [B, C]."""

    def forward(  # type: ignore
        self,
        x: Tensor,
        *,
        added: Tensor | None = None,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        silu: bool = False,
        dropout: Dropout | None = None,
        key: Tensor | None = None,
    ) -> Tensor:
        if kernels_for(x):
            return self.fused(x, None, added, scale, shift, silu, dropout, key)[0]
        if added is not None:
            x = x + spread(added)
        y = super().forward(x)
        if scale is not None:
            y = y * (1 + spread(scale))
        if shift is not None:
            y = y + spread(shift)
        y = F.silu(y) if silu else y
        return y if dropout is None else dropout(y, key)

    def past(
        self, x: Tensor, other: Tensor | None = None, *, silu: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The norm of x, or of the channels of x and other; and x and other for what flows past it, joined or not."""
        if kernels_for(x):
            return self.fused(x, other, None, None, None, silu, None, None)
        x = x if other is None else torch.cat((x, other), dim=1)
        return self(x, silu=silu), x, None

    def fused(
        self, x: Tensor, other: Tensor | None, added: Tensor | None, scale: Tensor | None, shift: Tensor | None,
        silu: bool, dropout: Dropout | None, key: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        from ict.nets import fused_norm

        weight, bias = self.weight, self.bias
        if scale is not None:
            weight, bias = weight * (1 + scale), bias * (1 + scale)
        if shift is not None:
            bias = bias + shift
        keys, p = (None, 0.0) if dropout is None else (dropout.keys(key), dropout.p)
        return fused_norm.norm(
            x, weight, bias, added, groups=self.num_groups, eps=self.eps, silu=silu, keys=keys, p=p, other=other
        )


def spread(values: Tensor) -> Tensor:
    """[C] or [B, C] -> over the pixels."""
    return values[..., None, None]
