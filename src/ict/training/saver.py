"""Checkpoints written in the background: the run waits for a copy of its numbers, not for the disk."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ict.config import Config
from ict.files import explain, free_space
from ict.model import ModelSpec
from ict.training.checkpoint import Copy, copy_state, prune, write_checkpoint
from ict.training.loop import TrainState


class Saver:
    """Writes one checkpoint at a time. One that cannot be written is warned of, and the run goes on."""

    def __init__(self, run: Path, spec: ModelSpec, config: Config, warn: Callable[[str], None], *, step: int):
        self.run, self.spec, self.config, self.warn = run, spec, config, warn
        self.saved = step  # of the newest checkpoint that is on the disk
        self.begun = step  # of the newest that was begun
        self.thread: threading.Thread | None = None
        self.finished = threading.Event()
        self.finished.set()
        self.error: Exception | None = None
        self.size = 0

    def save(self, state: TrainState, extras: dict[str, Any]) -> None:
        """Begin a checkpoint of this moment; waits for the one before."""
        self.wait()
        if self.saved == state.step:
            return
        self.begun = state.step
        copied = copy_state(state, self.spec, self.config, extras)
        self.finished.clear()
        self.thread = threading.Thread(target=self.write, args=(copied,), name="ict-saver")
        self.thread.start()

    def write(self, copied: Copy) -> None:
        try:
            self.size = copied.size
            written = write_checkpoint(self.run, copied)
            self.saved = copied.step
            prune(self.run, written, self.config.training)
        except Exception as error:  # told by `wait`, in the thread of the run
            self.error = error
        finally:
            self.finished.set()

    def wait(self) -> bool:
        """Until nothing is being written; says what went wrong, and whether the newest moment is on the disk."""
        self.finished.wait()  # not `join`, which a signal would end for good
        self.thread = None
        error, self.error = self.error, None
        if error is None:
            return self.saved == self.begun
        if not isinstance(error, OSError):
            raise error
        what = explain(error)
        if self.saved == self.begun:
            self.warn(f"step {self.begun:,} is saved, but an older checkpoint could not be deleted ({what})")
            return True
        self.warn(
            f"step {self.begun:,} could not be saved ({what}): a checkpoint needs {self.size / 2**20:,.1f} MiB, and "
            f"there are {free_space(self.run)} free. The run goes on; what was saved before is untouched"
        )
        return False

    @property
    def failed(self) -> bool:
        """Whether the last attempt has already failed; does not wait."""
        return self.error is not None
