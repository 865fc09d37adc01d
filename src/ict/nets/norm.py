"""GroupNorm with what stands around it: a sum before it, a scale and a shift by sample, a SiLU after."""

from torch import Tensor, nn
from torch.nn import functional as F

from ict.nets.kernels import kernels_for


class Norm(nn.GroupNorm):
    """y = norm(x + added) · (1 + scale) + shift, then a SiLU where asked. The three are [C] or [B, C]."""

    def forward(  # type: ignore
        self,
        x: Tensor,
        *,
        added: Tensor | None = None,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        silu: bool = False,
    ) -> Tensor:
        if kernels_for(x):
            return self.fused(x, added, scale, shift, silu)
        if added is not None:
            x = x + spread(added)
        y = super().forward(x)
        if scale is not None:
            y = y * (1 + spread(scale))
        if shift is not None:
            y = y + spread(shift)
        return F.silu(y) if silu else y

    def fused(self, x: Tensor, added: Tensor | None, scale: Tensor | None, shift: Tensor | None, silu: bool) -> Tensor:
        from ict.nets import fused

        weight, bias = self.weight, self.bias
        if scale is not None:
            weight, bias = weight * (1 + scale), bias * (1 + scale)
        if shift is not None:
            bias = bias + shift
        return fused.norm(x, weight, bias, added, groups=self.num_groups, eps=self.eps, silu=silu)


def spread(values: Tensor) -> Tensor:
    """[C] or [B, C] -> over the pixels."""
    return values[..., None, None]
