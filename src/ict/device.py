"""Which device work is done on, what room it has, and whether it does the same every time."""

import os

import torch
from torch import nn

from ict.reading import ConfigError


def make_deterministic(on: bool) -> None:
    """Let a GPU use only kernels that give the same bits every time (a CPU always does), or any kernel."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore  # nothing here reads unwritten memory
    torch.backends.cudnn.benchmark = not on


def place(module: nn.Module, device: torch.device | str, *, channels_last: bool = True) -> None:
    """Move a net to a device; on a GPU also into the layout that its convolutions are fastest in."""
    module.to(device)
    if channels_last and torch.device(device).type == "cuda":
        module.to(memory_format=torch.channels_last)  # type: ignore


def pick_device(name: str | torch.device) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"--device {name} cannot be used here ({str(error).splitlines()[0]}): try cpu") from error
    return device


def free_memory(device: torch.device) -> float:
    """Bytes that a GPU has to give: what nobody holds, and what torch keeps unused."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept
