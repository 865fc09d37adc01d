"""Whether layers use this project's own kernels (`fused.py`) or torch's: one switch for all of them."""

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_wanted = True


def use_kernels(on: bool) -> None:
    """Switch this project's kernels on (as they are at first) or off."""
    global _wanted
    _wanted = on


@contextmanager
def plain_layers() -> Iterator[None]:
    """Inside, all layers are torch's own also on a GPU: for comparing, and for derivatives that the kernels lack."""
    global _wanted
    before, _wanted = _wanted, False
    try:
        yield
    finally:
        _wanted = before


@functools.cache
def have_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def kernels_for(x: Tensor) -> bool:
    """Whether a feature map is one that the kernels serve; `torch.compile` writes its own."""
    return _wanted and not torch.compiler.is_compiling() and x.is_cuda and x.dtype != torch.float64 and have_triton()
