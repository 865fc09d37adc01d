"""A net's answers on a GPU as one launch: the second call of a kind is recorded as a CUDA graph, and played after that.

A net is hundreds of small kernels. Where a batch is small the host takes longer to launch them than the GPU to compute
them; a recording is launched at once, and gives the same bits. Training steps have recordings of their own
(training/passes.py).
"""

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ict.model import ConsistencyModel
from ict.nets.kernels import kernels_for

ROOM = 4  # kinds of calls that are known of a model: a batch, the rest of a set, ...

_wanted = True


def use_recordings(on: bool) -> None:
    """Switch recorded answers on (as they are at first) or off."""
    global _wanted
    _wanted = on


class Recording:
    """One call as a CUDA graph, with the tensors that it reads and leaves behind."""

    def __init__(self, model: ConsistencyModel, given: tuple[Tensor, ...], pool: Any):
        self.given = tuple(one.clone() for one in given)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # recordings have memory of their own
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.answer = model(*self.given)

    def play(self, given: tuple[Tensor, ...]) -> Tensor:
        for mine, one in zip(self.given, given, strict=True):
            mine.copy_(one)
        self.graph.replay()
        return self.answer.clone()  # before another recording of the model is played, in the same memory


@dataclass
class Calls:
    """What is known of one model's calls."""

    stream: torch.cuda.Stream | None  # that all recordings are played on: they share their memory
    pool: Any = None
    kinds: dict[tuple[Any, ...], Recording | None] = field(default_factory=dict)  # the one used last is the last
    lock: threading.Lock = field(default_factory=threading.Lock)
    refused: bool = False  # they cannot be recorded


_known: WeakKeyDictionary[ConsistencyModel, Calls] = WeakKeyDictionary()


@torch.no_grad()
def answer(model: ConsistencyModel, x: Tensor, sigma: Tensor, label: Tensor | None = None) -> Tensor:
    """f(x, σ) without a gradient, played where there is a recording of such a call."""
    given = (x, sigma) if label is None else (x, sigma, label)
    if not can_record(model, x):
        return model(*given)
    with torch.cuda.device(x.device):
        stream = torch.cuda.current_stream()
        calls = _known.setdefault(model, Calls(stream))
        if calls.refused or calls.stream != stream or not calls.lock.acquire(blocking=False):  # another thread is at it
            return model(*given)
        try:
            return take(calls, model, given)
        finally:
            calls.lock.release()


def can_record(model: ConsistencyModel, x: Tensor) -> bool:
    """Whether a call does nothing but compute: hooks would not be heard, and masks of dropout would stay the same."""
    if not (_wanted and x.is_cuda) or model.training or torch.cuda.is_current_stream_capturing():
        return False
    compiled = getattr(model.net, "_compiled_call_impl", None) is not None  # it may record by itself
    return not compiled and not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def take(calls: Calls, model: ConsistencyModel, given: tuple[Tensor, ...]) -> Tensor:
    """The answer to one call."""
    kind = kind_of(model, given)
    if kind not in calls.kinds:  # the first of its kind: kernels are chosen and compiled
        while len(calls.kinds) >= ROOM:
            del calls.kinds[next(iter(calls.kinds))]
        calls.kinds[kind] = None
        return model(*given)
    recording = calls.kinds.pop(kind)
    if recording is None:
        if not any(calls.kinds.values()):  # a pool that nobody uses any more is gone
            calls.pool = torch.cuda.graph_pool_handle()
        with contextlib.suppress(Exception):  # whatever it is: the call can be computed as it is
            recording = Recording(model, given, calls.pool)
    if recording is None:
        calls.refused = True
        calls.kinds.clear()
        return model(*given)
    calls.kinds[kind] = recording
    return recording.play(given)


def kind_of(model: ConsistencyModel, given: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """All that a recording cannot change: where the weights lie among it, but not what they are."""
    x = given[0]
    modes = (
        model.precision, model.noise, kernels_for(x),
        torch.is_autocast_enabled(x.device.type), torch.is_inference_mode_enabled(),
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    shapes = tuple((one.device, one.shape, one.stride(), one.dtype) for one in given)
    return modes, shapes, tuple(one.data_ptr() for one in (*model.parameters(), *model.buffers()))
