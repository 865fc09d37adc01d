"""Batches on the device, in the order of the steps: from a set that lies there whole, or streamed from its file.

Which images a step sees is known beforehand, so the next batches are gathered while a step runs. A batch depends only
on its step: a run that goes back or on anywhere gets the same.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from ict.data.images import Images
from ict.device import free_memory

Order = Callable[[int], Tensor]  # step -> indices of its images
AHEAD = 2  # batches gathered before they are wanted
SHARE = 0.25  # of the device's free memory that a set may take


class Feed(Protocol):
    """`take(step)` gives uint8 pixels [B, C, H, W] and class numbers [B] on the device; `reorder` goes on otherwise."""

    waited: float  # seconds that `take` kept its caller waiting

    def take(self, step: int) -> tuple[Tensor, Tensor]: ...

    def reorder(self, order: Order) -> None: ...

    def close(self) -> None: ...


def open_feed(images: Images, order: Order, device: torch.device, *, kind: str = "auto") -> Feed:
    """A feed by name, or by what fits."""
    if kind == "auto":
        kind = "resident" if fits(images, device) else "stream"
    return Resident(images, order, device) if kind == "resident" else Stream(images, order, device)


def fits(images: Images, device: torch.device) -> bool:
    """Whether a set should lie on the device whole: on a CPU if it is in memory anyhow."""
    if device.type != "cuda":
        return images.file is None
    return images.pixels.nbytes <= SHARE * free_memory(device)


class Resident:
    """The whole set on the device; a batch is picked there."""

    def __init__(self, images: Images, order: Order, device: torch.device):
        self.images, self.order, self.device = images.to(device), order, device
        images.forget()
        self.waited = 0.0

    def reorder(self, order: Order) -> None:
        self.order = order

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        indices = self.order(step).to(self.device, non_blocking=True)
        return self.images.pixels[indices], self.images.labels[indices]

    def close(self) -> None:
        pass


class Stream:
    """The next batches are gathered by a thread, into memory that a GPU can copy from while it computes."""

    def __init__(self, images: Images, order: Order, device: torch.device):
        self.images, self.order, self.device = images, order, device
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="ict-feed")
        self.coming: dict[int, Future[tuple[Tensor, Tensor, torch.cuda.Event | None]]] = {}
        self.lane = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.waited = 0.0

    def reorder(self, order: Order) -> None:
        for one in self.coming.values():
            one.cancel()
        self.coming.clear()  # what is being gathered is of the order before
        self.order = order

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        begun = time.perf_counter()
        for ahead in range(step, step + AHEAD + 1):
            if ahead not in self.coming:
                self.coming[ahead] = self.pool.submit(self.gather, ahead)
        for other in [other for other in self.coming if not step <= other <= step + AHEAD]:
            self.coming.pop(other).cancel()
        pixels, labels, copied = self.coming.pop(step).result()
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            pixels.record_stream(current)  # its memory must not be given away while this stream uses it
            labels.record_stream(current)
        self.waited += time.perf_counter() - begun
        return pixels, labels

    def gather(self, step: int) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
        indices = self.order(step)
        shape = (len(indices), *self.images.shape)
        pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=self.lane is not None)
        self.images.gather(indices, out=pixels)
        labels = self.images.labels[indices]
        if self.lane is None:
            return pixels, labels, None
        with torch.cuda.stream(self.lane):
            there = pixels.to(self.device, non_blocking=True), labels.pin_memory().to(self.device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self.lane)
            return *there, copied

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
