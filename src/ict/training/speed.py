"""Where the choices of a recipe's [speed] section are put into effect; what each does is said in docs/speed.md."""

import os

import torch

from ict.config import Config
from ict.device import make_deterministic, place
from ict.files import cache_home
from ict.model import ConsistencyModel
from ict.nets.kernels import have_triton, use_kernels
from ict.reading import require
from ict.recording import use_recordings


def set_up(config: Config, model: ConsistencyModel, device: torch.device) -> None:
    """Put a model on a device and get both ready to train as the recipe says."""
    speed = config.speed
    if speed.compile:  # before anything imports the compiler, which would choose a place that is not kept
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_home() / "inductor"))
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)  # recordings and kernels go where the current device is
        make_deterministic(config.training.deterministic)
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass gives NaN for some shapes (torch 2.11 to 2.13)
    use_kernels(speed.kernels)
    use_recordings(speed.graphs)
    place(model, device, channels_last=speed.channels_last)


def compile_net(model: ConsistencyModel) -> None:
    """Have torch.compile write the net's kernels, as one graph. What it writes is kept for the next start."""
    require(
        model.device.type == "cpu" or have_triton(), "speed.compile needs Triton, which is not installed: leave it out"
    )
    if model.net._compiled_call_impl is None:  # not twice
        model.net.compile(fullgraph=True, dynamic=False)
