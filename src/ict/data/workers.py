"""Decoding by several processes. An image that crashes or stalls the decoder costs one process, never the run.

Each process runs decoding.py: it takes chunks of entries on its standard input and answers on its standard output.
(Not `multiprocessing`: that would run the user's script again, or copy a process with threads.)
"""

import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from ict.data.decode import Target, fits
from ict.data.decoding import READY, Chunk, decode_chunk, emptied, send
from ict.data.pile import Entry

CHUNK = 64  # images a process takes at a time
HEAVY = 32 << 20  # bytes that a chunk brings along at most, but for its last image
PATIENCE = 60.0  # seconds for one image


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode_all(entries: Iterable[Entry], target: Target) -> Iterator[Chunk]:
    """Chunks in order, by as many processes as there are cores; only a few chunks are held in memory at a time."""
    count = cores()
    decoders: list[Decoder] = []
    mine = threading.local()
    over = threading.Event()

    def work(chunk: list[Entry]) -> Chunk:
        if not hasattr(mine, "decoder"):
            mine.decoder = Decoder(target)
            decoders.append(mine.decoder)
        return mine.decoder(chunk)

    def watch() -> None:
        while not over.wait(min(1.0, PATIENCE / 4)):
            for decoder in list(decoders):
                decoder.check()

    pool = ThreadPoolExecutor(count)
    threading.Thread(target=watch, daemon=True, name="ict-watch").start()
    try:
        waiting: deque[Future[Chunk] | Chunk] = deque()
        for chunk in batched(iter(entries)):
            # What needs no decoding is not worth the way to another process and back.
            ready = all(one.content is not None and not isinstance(one.content, bytes) and fits(one.content, target)
                        for one in chunk)  # fmt: skip
            waiting.append(decode_chunk(chunk, target) if ready else pool.submit(work, chunk))
            if len(waiting) > 3 * count:
                yield finished(waiting.popleft())
        while waiting:
            yield finished(waiting.popleft())
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for decoder in decoders:
            decoder.stop()
        pool.shutdown()


def batched(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    """Chunks of entries: so many, or fewer where they bring much along."""
    chunk: list[Entry] = []
    size = 0
    for entry in entries:
        chunk.append(entry)
        if entry.content is not None:
            size += len(entry.content) if isinstance(entry.content, bytes) else entry.content.nbytes
        if len(chunk) == CHUNK or size > HEAVY:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def finished(work: Future[Chunk] | Chunk) -> Chunk:
    return work.result() if isinstance(work, Future) else work


class Decoder:
    """One process that decodes; it is started again when an image has killed it."""

    def __init__(self, target: Target):
        self.target = target
        self.process: subprocess.Popen[bytes] | None = None
        self.deadline: float | None = None  # of the image that is being decoded
        self.late = self.stopped = False
        self.shared = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`)
        self.shared.truncate(8)
        self.counter = mmap.mmap(self.shared.fileno(), 8)
        self.seen = 0

    def __call__(self, chunk: list[Entry]) -> Chunk:
        answer, place = self.ask(chunk)
        if not isinstance(answer, str):
            return answer
        parts = [
            self(chunk[:place]) if place else ([], b""),
            ([(emptied(chunk[place]), answer, (0, 0))], b""),
            self(chunk[place + 1 :]) if place + 1 < len(chunk) else ([], b""),
        ]
        return [outcome for outcomes, _ in parts for outcome in outcomes], b"".join(pixels for _, pixels in parts)

    def ask(self, chunk: list[Entry]) -> tuple[Chunk | str, int]:
        """The answer of the process, or what became of it and at which image."""
        process = self.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            self.counter[:8] = bytes(8)
            self.seen, self.deadline = 0, time.monotonic() + PATIENCE
            send(process.stdin, chunk)
            return pickle.load(process.stdout), 0  # from our own process
        except (OSError, EOFError, pickle.UnpicklingError):
            if self.stopped:
                raise
            self.process = None
            process.kill()
            code, late = process.wait(), self.late
            self.late = False
            place = max(0, self.begun() - 1)
            if late:
                return f"takes longer than {PATIENCE:g} s to decode", place
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return f"the decoder crashed on it ({name})", place
        finally:
            self.deadline = None

    def check(self) -> None:
        """Stop the process if its image takes too long."""
        if self.deadline is None or self.process is None:
            return
        if self.begun() != self.seen:  # another image than when last looked
            self.seen, self.deadline = self.begun(), time.monotonic() + PATIENCE
        elif time.monotonic() > self.deadline:
            self.late = True
            self.process.kill()

    def begun(self) -> int:
        """How many images of the chunk the process has begun with; it writes that where both can see it."""
        return int.from_bytes(self.counter[:8], "little")

    def start(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            # The same import path as here, and no way to the user's own main module.
            program = f"import sys; sys.path[:] = {sys.path!r}; from ict.data.decoding import main; main()"
            handle = self.shared.fileno()
            command = [sys.executable, "-c", program, str(handle)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(handle,))
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
        self.shared.close()
