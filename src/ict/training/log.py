"""The run's log: one JSON object a line, each the mean over the steps since the line before."""

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ict.files import check_folder, write_atomically
from ict.reading import ConfigError
from ict.training.loop import TrainState


class TrainingFailed(RuntimeError):
    """The run cannot go on; the message says why and what to try."""


class RunLog:
    """Appends to RUN/log.jsonl every `every` steps. Two runs of one seed differ only in the fields about time."""

    TIMES = ("seconds", "images_per_second", "data_wait")

    def __init__(self, path: Path | None, *, every: int, batch: int, warn: Callable[[str], None] = print):
        self.path, self.every, self.batch, self.warn = path, every, batch, warn
        self.unwritten = b""  # lines that the disk has not taken yet
        self.since = time.monotonic()
        self.waited = 0.0  # of this process, at the last line
        self.timed = 0  # steps of this process since then
        self.clear()

    def clear(self) -> None:
        """Begin a new line."""
        self.count = 0
        self.loss = self.gradient = torch.zeros((), dtype=torch.float64)  # added to out of place

    def step(self, state: TrainState) -> dict[str, Any] | None:
        """Take a step in; gives the record when one was written. Losses stay on the device until then.

        Steps that were skipped do not count.
        """
        if state.taken:
            self.loss = self.loss.to(state.loss.device) + state.loss.double()
            self.gradient = self.gradient.to(state.loss.device) + state.gradient.double()
            self.count += 1
            self.timed += 1
        due = state.step % self.every == 0 or state.step == 1
        return self.write(state) if due and self.count else None

    def finish(self, state: TrainState) -> None:
        """At the end of a run, write what the last line has left over, and what the disk has not taken so far."""
        if self.count:
            self.write(state)
        self.append(b"")

    def write(self, state: TrainState) -> dict[str, Any]:
        """Append a line about the steps since the one before."""
        now = time.monotonic()
        record = {
            "step": state.step,
            "images": state.step * self.batch,
            **state.stats,
            "loss": float(self.loss) / self.count,
            "gradient": float(self.gradient) / self.count,
            "lr": state.lr,
            **state.figures(),
            "seconds": round(state.seconds, 3),
            "images_per_second": round(self.timed * self.batch / max(1e-9, now - self.since), 1),
            "data_wait": round((state.waited - self.waited) / max(1e-9, now - self.since), 5),
        }
        self.append((json.dumps(record) + "\n").encode())
        self.since, self.waited, self.timed = now, state.waited, 0
        self.clear()
        return record

    def append(self, line: bytes) -> None:
        """Add to the file, whole lines or nothing; what the disk does not take now is tried again with the next."""
        if self.path is None or not (line or self.unwritten):
            return
        late, self.unwritten = self.unwritten, self.unwritten + line
        try:
            check_folder(self.path.parent)
            with self.path.open("ab", buffering=0) as file:
                size = file.tell()
                try:
                    written = file.write(self.unwritten)
                    if written != len(self.unwritten):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                except OSError:
                    file.truncate(size)
                    raise
            self.unwritten = b""
        except OSError as error:
            if not late:
                self.warn(f"the log cannot be written ({self.path}: {error.strerror}); its lines are kept until it can")

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the lines to come; the lines written so far are put on the disk."""
        self.append(b"")
        with contextlib.suppress(OSError), open(self.path or os.devnull, "rb") as file:
            os.fsync(file.fileno())
        return {"count": self.count, "loss": float(self.loss), "gradient": float(self.gradient)}

    def resume(self, state: dict[str, Any], step: int) -> None:
        """Go on as the log was at `step`: later lines, written before the run broke off, are dropped."""
        self.count = state["count"]
        self.loss, self.gradient = (torch.tensor(state[k], dtype=torch.float64) for k in ("loss", "gradient"))
        if self.path is None:
            return
        self.append(b"")
        waiting = [line for line in self.unwritten.splitlines(keepends=True) if json.loads(line)["step"] <= step]
        self.unwritten = b"".join(waiting)
        try:
            check_folder(self.path.parent)
        except OSError:  # it has vanished, and is not made anew
            return
        kept = [record for record in read_log(self.path) if record["step"] <= step]
        if kept and kept[-1]["step"] == step:  # the run had ended here, and its last line is written
            self.clear()
        try:
            write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        except OSError as error:
            self.warn(f"lines past step {step:,} stay in the log ({self.path}: {error.strerror})")


def read_log(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a log; a last line that was cut off is passed over."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            int(record["step"]), float(record["loss"])
            while records and records[-1]["step"] >= record["step"]:
                records.pop()  # the run had gone back, and the disk did not let it say so
            records.append(record)
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                raise ConfigError(f"{path}, line {number} is not a line of a log: remove it") from None
    return records
