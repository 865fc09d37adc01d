"""Which noise an image gets: its own draw, or of the batch's draws one that lies near it (minibatch optimal transport).

Each draw is still given to one image, so noise stays normal as a whole. But images that would be told apart only far
down now start from different places, and what is learned about one contradicts the others less (Pooladian et al., 2023;
for consistency models Dou et al., 2024, and Issenhuth et al., 2024).
"""

import torch
from torch import Tensor

from ict.nets.kernels import kernels_for

KEPT = 1e12  # a likeness that nothing is exchanged for
SWEEPS = 4  # over all pairs; more find hardly more


def couple(images: Tensor, noise: Tensor, *, takes_part: Tensor) -> Tensor:
    """The noise of a batch in another order: that in which no two images would gain by an exchange, or nearly.

    A pair's gain is its inner product: minus half the squared distance, but for what does not depend on the order.
    Images that do not take part (bool [B]) keep their own.
    """
    with torch.no_grad():
        likeness = images.flatten(1).float() @ noise.flatten(1).float().T
        likeness.diagonal().masked_fill_(~takes_part, KEPT)
        return noise[match(likeness)]


def match(likeness: Tensor) -> Tensor:
    """For each row of a square matrix [B, B] a column of its own, int64 [B], so that their sum is large.

    Rows exchange their columns two by two where both together gain: each round all rows i with their partners i xor r,
    so that after all rounds r everyone has met everyone. About 92 % of the best sum's lead over a random one for 256
    images of CIFAR-10, at a cost that does not depend on what is in the matrix.
    """
    if kernels_for(likeness):
        from ict.objectives.fused_coupling import match_fused

        return match_fused(likeness.contiguous(), sweeps=SWEEPS)
    count = len(likeness)
    rows = columns = torch.arange(count, device=likeness.device)
    own = likeness.diagonal()
    for r in [*range(1, rounds(count))] * SWEEPS:
        partners = rows ^ r
        met = partners < count
        partners = torch.where(met, partners, rows)
        theirs = columns[partners]
        then = likeness[rows, theirs]
        gain = then - own
        exchange = met & (gain + gain[partners] > 0)
        columns, own = torch.where(exchange, theirs, columns), torch.where(exchange, then, own)
    return columns


def rounds(count: int) -> int:
    """The power of two from which on i xor r has no new partners."""
    return 1 << max(0, count - 1).bit_length()
