"""How precisely a net computes: the trunk may use fewer digits, what is around it never does.

Student and teacher differ by little, and the more levels the less: at N = 1281 neighbouring levels differ by 0.4 %.
Preconditioning, noise embedding and loss are always float32. For the trunk a table in docs/speed.md says how far each
precision turns the gradient, at every N and noise level; SAFE is what follows from it.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}

_full = False

# precision -> the largest N at which its gradient is safe; the fastest first
SAFE = {"fp16": 1281}


def pick_precision(asked: str, device: torch.device, *, levels: int | None = None) -> str:
    """What `auto` means on a device at N = levels (None: where no gradient is taken)."""
    if asked != "auto":
        return asked
    if device.type != "cuda":
        return "float32"
    if torch.cuda.get_device_capability(device) >= (7, 0):  # half precision in matrix units
        for name, limit in SAFE.items():
            if levels is None or levels <= limit:
                return name
    return "tf32"


def allow_tf32(precision: str) -> None:
    """Let convolutions round their factors to tf32, unless all is to be float32."""
    torch.backends.cudnn.allow_tf32 = precision != "float32"


@contextlib.contextmanager
def quick_products() -> Iterator[None]:
    """Inside, products of float32 matrices on a GPU may round their factors to tf32."""
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Inside, no trunk computes in half precision, whatever its model says: for derivatives along a path."""
    global _full
    before, _full = _full, True
    try:
        yield
    finally:
        _full = before


def is_full() -> bool:
    """Whether we are inside of `full_precision`."""
    return _full


def trunk(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    """Inside, layers compute in this precision."""
    if precision not in HALF or _full:
        return contextlib.nullcontext()
    return torch.autocast(device.type, HALF[precision], cache_enabled=False)


def exact(x: Tensor) -> contextlib.AbstractContextManager:
    """Inside, layers compute in float32 whatever the trunk does."""
    return contextlib.nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)
