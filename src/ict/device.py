"""Which device work is done on, and whether it does the same every time."""

import os

import torch

from ict.config import ConfigError


def make_deterministic(on: bool) -> None:
    """Let a GPU use only kernels that give the same bits every time (a CPU always does), or any kernel."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore  # nothing here reads unwritten memory
    torch.backends.cudnn.benchmark = not on


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name} cannot be used here ({str(error).splitlines()[0]}): try cpu") from error
    return device
