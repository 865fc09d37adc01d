"""Decoding by several processes. An image that crashes or stalls the decoder costs one process, never the run.

Each process runs decoding.py: it takes chunks of entries on its standard input and answers on its standard output.
(Not `multiprocessing`: that would run the user's script again, or copy a process with threads.)
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from ict.data.decode import Target, fits
from ict.data.decoding import READY, Chunk, decode_chunk, emptied, send
from ict.data.pile import Entry

CHUNK = 64  # images a process takes at a time
FEW = 128  # images that are not worth a process
PATIENCE = 60.0  # seconds for one image


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode_all(entries: Iterable[Entry], target: Target) -> Iterator[Chunk]:
    """Chunks in order, by as many processes as there are cores; only a few chunks are held in memory at a time."""
    rest = iter(entries)
    first = list(islice(rest, FEW))
    if len(first) < FEW:
        yield decode_chunk(first, target)
        return
    chunks = batched(first, rest)
    count = cores()
    decoders: list[Decoder] = []
    mine = threading.local()

    def work(chunk: list[Entry]) -> Chunk:
        if not hasattr(mine, "decoder"):
            mine.decoder = Decoder(target)
            decoders.append(mine.decoder)
        return mine.decoder(chunk)

    pool = ThreadPoolExecutor(count)
    try:
        waiting: deque[Future[Chunk] | Chunk] = deque()
        for chunk in chunks:
            # What needs no decoding is not worth the way to another process and back.
            ready = all(one.content is not None and not isinstance(one.content, bytes) and fits(one.content, target)
                        for one in chunk)  # fmt: skip
            waiting.append(decode_chunk(chunk, target) if ready else pool.submit(work, chunk))
            if len(waiting) > 3 * count:
                yield finished(waiting.popleft())
        while waiting:
            yield finished(waiting.popleft())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for decoder in decoders:
            decoder.stop()
        pool.shutdown()


def batched(first: list[Entry], rest: Iterator[Entry]) -> Iterator[list[Entry]]:
    for start in range(0, len(first), CHUNK):
        yield first[start : start + CHUNK]
    while chunk := list(islice(rest, CHUNK)):
        yield chunk


def finished(work: Future[Chunk] | Chunk) -> Chunk:
    return work.result() if isinstance(work, Future) else work


class Decoder:
    """One process that decodes; it is started again when an image has killed it."""

    def __init__(self, target: Target):
        self.target = target
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False

    def __call__(self, chunk: list[Entry]) -> Chunk:
        answer = self.ask(chunk)
        if not isinstance(answer, str):
            return answer
        if len(chunk) > 1:  # one of them is to blame
            parts = [self([entry]) for entry in chunk]
            return [outcome for outcomes, _ in parts for outcome in outcomes], b"".join(pixels for _, pixels in parts)
        return [(emptied(chunk[0]), answer, (0, 0))], b""

    def ask(self, chunk: list[Entry]) -> Chunk | str:
        """The answer of the process, or what became of it."""
        process = self.start()
        late = threading.Event()
        watch = threading.Timer(PATIENCE * len(chunk), lambda: (late.set(), process.kill()))
        watch.daemon = True
        watch.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            send(process.stdin, chunk)
            return pickle.load(process.stdout)  # from our own process
        except (OSError, EOFError, pickle.UnpicklingError):
            if self.stopped:
                raise
            self.process = None
            code = process.wait()
            if late.is_set():
                return f"takes longer than {PATIENCE:g} s to decode"
            return f"the decoder crashed on it ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"
        finally:
            watch.cancel()

    def start(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            # The same import path as here, and no way to the user's own main module.
            program = f"import sys; sys.path[:] = {sys.path!r}; from ict.data.decoding import main; main()"
            self.process = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert self.process.stdin is not None and self.process.stdout is not None
            send(self.process.stdin, self.target)
            if self.process.stdout.read(len(READY)) != READY:
                raise RuntimeError(f"no process to decode images could be started with {sys.executable}")
        return self.process

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None:
            self.process.kill()
            self.process.wait()
