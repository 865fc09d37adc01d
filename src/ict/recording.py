"""Work on a GPU as one launch: recorded as a CUDA graph once, and played from then on. Here, the answers of a net.

A net is hundreds of small kernels. Where a batch is small the host takes longer to launch them than the GPU to compute
them; a recording is launched at once, and gives the same bits. The second call of a kind is recorded. Training steps
have recordings of their own (training/passes.py).
"""

import contextlib
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ict.model import ConsistencyModel
from ict.nets.kernels import kernels_for
from ict.precision import is_full

T = TypeVar("T")

ROOM = 4  # kinds of calls that are known of a model: a batch, the rest of a set, ...
STREAMS = 2  # on which a model's calls are recorded

_wanted = True
_recording = threading.Lock()  # CUDA takes one recording at a time in a process
_streams: dict[int, torch.cuda.Stream] = {}  # device -> where recordings are made on it
_refused: list[torch.cuda.CUDAGraph] = []  # which torch may still ask whether memory is theirs


def use_recordings(on: bool) -> None:
    """Switch recorded answers on (as they are at first) or off."""
    global _wanted
    _wanted = on
    if not on:
        _known.clear()


def record(work: Callable[[], T], *, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """What `work` launches on the current device as a graph, and the tensors that it leaves when the graph is played.

    The work must have been done once by the same thread. If it cannot be recorded this raises, and the thread goes on
    where it was; its pool cannot be used again then.
    """
    before, graph, device = torch.cuda.current_stream(), torch.cuda.CUDAGraph(), torch.cuda.current_device()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    with _recording:
        if device not in _streams:  # one that nobody else gets: what others put on it would be recorded, too
            _streams[device] = torch.cuda.Stream(priority=-1)
        try:
            with torch.cuda.graph(graph, pool=pool, stream=_streams[device], capture_error_mode="thread_local"):
                left = work()
        except BaseException:
            mend(graph, pool, device)
            raise
        finally:
            torch.cuda.set_stream(before)  # which torch forgets after an error
            torch._C._cuda_clearCublasWorkspaces()  # which would be shared with the next recording
    return graph, left


def mend(graph: torch.cuda.CUDAGraph, pool: Any, device: int) -> None:
    """Make torch whole after a recording that CUDA refused: 2.11 stops there before it has cleaned up.

    It would not give memory back any more, and not draw a random number: its generator waits for a recording to end,
    whichever. (Newer ones end the pool by themselves, and hold what is in it.)
    """
    with contextlib.suppress(RuntimeError):  # not under way: it never was, or the work itself failed, and it has ended
        torch._C._cuda_endAllocateToPool(device, pool)
        _refused.append(graph)
        torch._C._cuda_releasePool(device, pool)
    with contextlib.suppress(Exception):  # the reason that the caller hears of is the first
        record_nothing(_streams[device])


def record_nothing(stream: torch.cuda.Stream) -> None:
    """The shortest recording."""
    with torch.inference_mode(), torch.cuda.stream(stream):  # the mode in which anything may be written to
        graph, number = torch.cuda.CUDAGraph(), torch.zeros(1, device=stream.device)
        graph.capture_begin(capture_error_mode="thread_local")
        number.zero_()  # torch warns of a graph without anything
        graph.capture_end()


class Recording:
    """One call of a model, with the tensors that it reads and leaves behind."""

    def __init__(self, model: ConsistencyModel, given: tuple[Tensor, ...], pool: Any):
        self.given = tuple(one.clone() for one in given)
        self.graph, self.answer = record(lambda: model(*self.given), pool=pool)

    def play(self, given: tuple[Tensor, ...]) -> Tensor:
        for mine, one in zip(self.given, given, strict=True):
            mine.copy_(one)
        self.graph.replay()
        return self.answer.clone()  # before another recording of the model is played, in the same memory


@dataclass
class Calls:
    """What is known of one model's calls on one stream. Their recordings share their memory."""

    # None: seen once, False: cannot be recorded; what was used last is the last
    kinds: dict[tuple[Any, ...], Recording | Literal[False] | None] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    pool: Any = None

    @property
    def holds(self) -> bool:
        """Whether there is a recording."""
        return any([*self.kinds.values()])


_known: WeakKeyDictionary[ConsistencyModel, dict[torch.cuda.Stream, Calls]] = WeakKeyDictionary()


def forget(model: ConsistencyModel) -> None:
    """Give the memory of a model's recordings back."""
    _known.pop(model, None)


@torch.no_grad()
def answer(model: ConsistencyModel, x: Tensor, sigma: Tensor, label: Tensor | None = None) -> Tensor:
    """f(x, σ) without a gradient, played where there is a recording of such a call."""
    given = (x, sigma) if label is None else (x, sigma, label)
    if not can_record(x):
        return model(*given)
    kind = kind_of(model, given)
    if kind is None:
        return model(*given)
    with torch.cuda.device(x.device):
        streams, stream = _known.setdefault(model, {}), torch.cuda.current_stream()
        while stream not in streams and len(streams) >= STREAMS:
            streams.pop(next(iter(streams)), None)
        calls = streams.setdefault(stream, Calls())
        if not calls.lock.acquire(blocking=False):  # another thread is at it
            return model(*given)
        try:
            return take(calls, kind, model, given)
        finally:
            calls.lock.release()


def take(calls: Calls, kind: tuple[Any, ...], model: ConsistencyModel, given: tuple[Tensor, ...]) -> Tensor:
    """The answer to one call, played or computed."""
    known, recording = kind in calls.kinds, calls.kinds.pop(kind, None)
    if recording:
        calls.kinds[kind] = recording
        return recording.play(given)
    while len(calls.kinds) >= ROOM:
        del calls.kinds[next(iter(calls.kinds))]
    computed = compute(calls, model, given)
    if known and recording is None:
        if calls.pool is None or not calls.holds:  # a pool that nobody uses any more is gone
            calls.pool = torch.cuda.graph_pool_handle()
        try:
            recording = Recording(model, given, calls.pool)
        except Exception as error:  # whatever it is: the call can be computed
            recording, calls.pool = False, None
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            warnings.warn(f"samples of this kind cannot be recorded and will be slower ({reason})", stacklevel=2)
    calls.kinds[kind] = recording
    return computed


def compute(calls: Calls, model: ConsistencyModel, given: tuple[Tensor, ...]) -> Tensor:
    """The answer; if there is no room for it, without the recordings of all models."""
    try:
        return model(*given)
    except torch.OutOfMemoryError:
        known = [each for streams in [*_known.values()] for each in [*streams.values()]]
        if not (_recording.locked() or any(each.holds for each in known)):
            raise
    with _recording:  # while there is one under way, torch gives nothing back
        calls.kinds.clear()
        _known.clear()
        torch.cuda.empty_cache()
    return model(*given)


def can_record(x: Tensor) -> bool:
    """Whether a call does what its model says and nothing around it changes that."""
    if not (_wanted and x.is_cuda) or torch.cuda.is_current_stream_capturing():
        return False
    heard = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    return not (heard or torch.is_autocast_enabled(x.device.type) or is_full())


def kind_of(model: ConsistencyModel, given: tuple[Tensor, ...]) -> tuple[Any, ...] | None:
    """All that a recording cannot change: where the weights lie among it, but not what they are.

    (A number that a layer keeps as a plain attribute is not looked at.) None where a call does more than compute: a
    hook would not be heard, masks of dropout would stay the same, and a compiled net may record by itself.
    """
    places: list[Any] = []
    modules: list[nn.Module | None] = [model]
    while modules:  # what model.modules() and model.parameters() give, in a third of the time
        module = modules.pop()
        if module is None:
            continue
        if (
            module.training or module._forward_hooks or module._forward_pre_hooks or "_orig_mod" in module._modules
            or module._compiled_call_impl is not None
        ):  # fmt: skip
            return None
        for tensors in (module._parameters, module._buffers):
            places += [
                (one.data_ptr(), one.shape, one.stride(), one.dtype) for one in tensors.values() if one is not None
            ]
        places.append(id(module))
        modules += module._modules.values()
    products, cudnn, attention = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda
    settings = (
        model.kind, model.noise, model.precision, kernels_for(given[0]), torch.is_inference_mode_enabled(),
        products.fp32_precision, products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction, cudnn.conv.fp32_precision, cudnn.enabled,  # type: ignore
        cudnn.deterministic, torch.are_deterministic_algorithms_enabled(), attention.flash_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(), attention.math_sdp_enabled(), attention.cudnn_sdp_enabled(),
    )  # fmt: skip
    return settings, tuple((one.device, one.shape, one.stride(), one.dtype) for one in given), tuple(places)
