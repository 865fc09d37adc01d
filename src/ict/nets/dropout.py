"""Dropout whose mask is a function of its key: the same for student and teacher (§3.1), wherever they run."""

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """Dropout whose mask is a function of (key of the sample, this layer, element).

    Student and teacher are given the same keys and so the same masks, with no generator to save and restore: that
    holds on a CPU, on a GPU, under `torch.compile`, and however a batch is cut among ranks. A key is one 32-bit integer
    a sample.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.salt = 0  # number_dropouts gives each layer of a net its own

    def forward(self, x: Tensor, key: Tensor | None) -> Tensor:
        keys = self.keys(key)
        return x if keys is None else torch.where(hashed_mask(x.shape, keys, p=self.p), x * (1 / (1 - self.p)), 0)

    def keys(self, key: Tensor | None) -> Tensor | None:
        """What decides this layer's mask: int32 [B], or None where nothing is dropped."""
        if not self.training or self.p == 0:
            return None
        if key is None:
            raise ValueError(
                "a net with dropout needs a key for each sample in training mode: pass key=… or call .eval()"
            )
        return layer_keys(key, salt=self.salt)


def dropout_mask(shape: torch.Size, key: Tensor, *, p: float, salt: int) -> Tensor:
    """True where an element is kept -> bool of `shape`; a 32-bit integer hash of (key, salt, element)."""
    return hashed_mask(shape, layer_keys(key, salt=salt), p=p)


def layer_keys(key: Tensor, *, salt: int) -> Tensor:
    """The keys of one layer -> int32 [B]."""
    return _mix(key.to(torch.int32) ^ _signed(_GOLDEN * (salt + 1)))


def hashed_mask(shape: torch.Size, keys: Tensor, *, p: float) -> Tensor:
    """True where an element is kept -> bool of `shape`."""
    elements = torch.arange(shape[1:].numel(), device=keys.device, dtype=torch.int32).reshape(1, *shape[1:])
    # Both sides are mixed before they meet: a plain product of `arange` would be folded by torch.compile into an index
    # expression that leaves int32, and a plain xor would make the masks of some samples permutations of each other.
    return (_mix(_mix(elements) ^ keys.reshape(-1, *[1] * (len(shape) - 1))) & 0xFFFFFF) >= threshold(p)


def threshold(p: float) -> int:
    """Words of 24 bits below this are dropped."""
    return round(p * 2**24)


_GOLDEN = 0x9E3779B9


def _mix(x: Tensor) -> Tensor:
    """An avalanche over 32 bits (constants of Wellons' search for low bias); int32 arithmetic wraps."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _signed(0x7FEB352D)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word


def number_dropouts(net: nn.Module) -> None:
    """Give every dropout layer of a net its own salt, by position."""
    for number, layer in enumerate(m for m in net.modules() if isinstance(m, Dropout)):
        layer.salt = number
