"""One run on many processes: who they are, and how they speak with each other.

`torchrun` starts the processes and tells each its rank in the environment; a plain start is one rank alone. Everything
random is a function of the sample's place in the whole batch, so what a rank computes does not depend on their number.
"""

import gc
import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ict.reading import require

PATIENCE = timedelta(minutes=30)  # a rank may wait for another that prepares a set or scores a model


class Spread(DistributedDataParallel):
    """A model whose gradients are averaged over the ranks; everything else of it is the model's own."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the `count` of a run."""

    rank: int = 0
    count: int = 1
    local: int = 0  # among those of this machine: the number of its GPU

    @property
    def main(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    def share(self, things: Tensor) -> Tensor:
        """This rank's part of a row of things: a stretch of it, all equally long or one longer than others."""
        return things.tensor_split(self.count)[self.rank]

    def spread(self, model: nn.Module) -> nn.Module:
        """The model, with gradients that are the mean over the ranks."""
        if self.count == 1:
            return model
        device = next(model.parameters()).device
        places = [device.index] if device.type == "cuda" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions would rather be asked by another name
            return Spread(model, device_ids=places, broadcast_buffers=False, gradient_as_bucket_view=True)

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.count > 1:
            distributed.all_reduce(tensor)
        return tensor

    def highest(self, values: list[float]) -> list[float]:
        """The highest of each number over the ranks; no GPU is waited for."""
        if self.count == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
        return tensor.tolist()

    def from_main(self, thing: Any = None) -> Any:
        """What the main rank says, on every rank."""
        if self.count == 1:
            return thing
        box = [thing]
        distributed.broadcast_object_list(box, src=0)
        return box[0]

    def copy_main(self, tensors: Iterator[Tensor]) -> None:
        """Give every rank the main rank's values of these tensors."""
        if self.count > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, src=0)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, one rank after the other -> on every rank."""
        if self.count == 1:
            return rows
        lengths = [0] * self.count
        distributed.all_gather_object(lengths, len(rows))
        longest = max(lengths)
        padded = torch.zeros(longest, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
        padded[: len(rows)] = rows
        found = [torch.empty_like(padded) for _ in lengths]
        distributed.all_gather(found, padded)
        return torch.cat([one[:length] for one, length in zip(found, lengths, strict=True)])

    def wait(self) -> None:
        """Until every rank is here."""
        self.highest([0.0])


ALONE = Ranks()


def rank_of_environment() -> Ranks:
    """What torchrun says in the environment; alone without it."""
    try:
        rank, count, local = (int(os.environ.get(name, usual)) for name, usual in VARIABLES.items())
    except ValueError:
        names = ", ".join(f"{name}={os.environ.get(name)!r}" for name in VARIABLES)
        require(False, f"{names}: these should be numbers; start with torchrun, or unset them")
        raise
    complete = count == 1 or {"MASTER_ADDR", "MASTER_PORT", "RANK"} <= os.environ.keys()
    require(
        0 <= rank < count and local >= 0 and complete,
        f"the environment says RANK={rank}, WORLD_SIZE={count}, but not all that belongs to it: start with torchrun, "
        "or unset them",
    )
    return Ranks(rank=rank, count=count, local=local)


def device_of_rank(device: torch.device) -> torch.device:
    """The device of this rank: each its own GPU."""
    ranks = rank_of_environment()
    if ranks.count == 1 or device.type != "cuda":
        return device
    require(device.index is None, f"--device {device}: with several ranks each takes its own GPU; give cuda or auto")
    count = torch.cuda.device_count()
    require(
        ranks.local < count,
        f"rank {ranks.rank} has no GPU: this machine has {count}; start as many with --nproc-per-node",
    )
    return torch.device("cuda", ranks.local)


VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@contextmanager
def join_ranks(device: torch.device) -> Iterator[Ranks]:
    """Meet the other ranks of this run, and part from them at the end."""
    ranks = rank_of_environment()
    if ranks.count == 1:
        yield ranks
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Numbers that only the host needs go by gloo, so that no GPU is waited for. After a restart torchrun's store still
    # holds the keys of the group before, so each attempt has a prefix of its own.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = next(distributed.rendezvous("env://", timeout=PATIENCE))[0]
    store = distributed.PrefixStore(f"ict-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    distributed.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.count, timeout=PATIENCE)
    try:
        yield ranks
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        gc.collect()  # whatever still holds the group would keep its threads, and a process that ends with them aborts
        distributed.destroy_process_group()
