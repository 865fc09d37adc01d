"""The process that decodes. It imports only what it needs, to start at once."""

import mmap
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import IO

from ict.data.decode import Refused, Target, decode_planes
from ict.data.pile import Entry, read_entry

READY = b"ready"

# An image (its contents are dropped), why it was refused if it was, and its width and height.
Outcome = tuple[Entry, str | None, tuple[int, int]]
Chunk = tuple[list[Outcome], bytes]  # some images, and the pixels of those that were not refused


def decode_chunk(chunk: list[Entry], target: Target, begun: Callable[[], object] | None = None) -> Chunk:
    """The work itself; `begun` is called before each image."""
    outcomes: list[Outcome] = []
    pixels: list[bytes] = []
    for entry in chunk:
        if begun is not None:
            begun()
        reason, size = None, (0, 0)
        try:
            planes, size = decode_planes(read_entry(entry), target)
            pixels.append(planes)
        except Refused as refused:
            reason = str(refused)
        outcomes.append((emptied(entry), reason, size))
    return outcomes, b"".join(pixels)


def emptied(entry: Entry) -> Entry:
    return entry if entry.content is None else replace(entry, content=None)


def send(stream: IO[bytes], thing: object) -> None:
    pickle.dump(thing, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def main() -> None:
    """Decode until the input ends, which it does at the latest when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints does not get between the answers
    questions = sys.stdin.buffer
    target = pickle.load(questions)
    answers.write(READY)
    answers.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nor does it reach the user: what matters is a reason
    os.dup2(2, 1)
    counter = mmap.mmap(int(sys.argv[1]), 8)  # shared with the parent: how many images of the chunk were begun

    def count() -> None:
        counter[:8] = (int.from_bytes(counter[:8], "little") + 1).to_bytes(8, "little")

    while True:
        try:
            chunk = pickle.load(questions)
        except EOFError:
            return
        counter[:8] = bytes(8)
        send(answers, decode_chunk(chunk, target, begun=count))
