"""The rounds of `coupling.match` in one kernel: a row a lane, and its partner's column by a look at the neighbour."""

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from ict.objectives.coupling import rounds


@triton.jit
def _match_kernel(likeness, found, count, sweeps, wide: tl.constexpr):
    row = tl.arange(0, wide)
    inside = row < count
    column = row
    own = tl.load(likeness + row * count + column, inside, 0.0)
    for _ in range(sweeps):
        for r in range(1, wide):
            partner = row ^ r
            met = inside & (partner < count)
            theirs = tl.gather(column, partner, 0)
            then = tl.load(likeness + row * count + theirs, met, 0.0)
            gain = tl.where(met, then - own, 0.0)
            exchange = met & (gain + tl.gather(gain, partner, 0) > 0)
            column = tl.where(exchange, theirs, column)
            own = tl.where(exchange, then, own)
    tl.store(found + row, column.to(tl.int64), inside)


def match_fused(likeness: Tensor, *, sweeps: int) -> Tensor:
    """As `coupling.match`; float32 [B, B] without gaps."""
    count = len(likeness)
    found = torch.empty(count, dtype=torch.int64, device=likeness.device)
    wide = rounds(count)
    _match_kernel[(1,)](likeness, found, count, sweeps, wide=wide, num_warps=min(32, max(1, wide // 32)))
    return found
