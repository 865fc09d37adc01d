"""What a person sees while a run goes on: a live line on a terminal, plain lines anywhere else."""

import os
import sys
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ict.training.loop import TrainState


class LastingConsole(Console):
    """A console whose reader may go away (`ict train … | head`) without stopping the run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def format_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


QUIET = 30.0  # seconds of long work without a word, where there is no terminal for a bar


class Bar:
    """Something with a bar that is shown while it is entered; elsewhere than on a terminal it says a line at times."""

    bar: Progress
    task: TaskID
    spoken: float = 0.0
    quiet: bool = False

    def __enter__(self) -> Self:
        self.spoken = time.monotonic()
        self.bar.start()
        return self

    def name(self, text: str) -> None:
        """Say what is being worked on now."""
        self.bar.update(self.task, description=text)

    def advance(self, done: int, total: int | None) -> None:
        self.bar.update(self.task, completed=done, total=total)
        if self.bar.disable and not self.quiet and time.monotonic() - self.spoken >= QUIET:
            self.spoken = time.monotonic()
            share = f" of {total:,} ({done / total:.0%})" if total else ""
            print(f"{self.bar.tasks[0].description}: {done:,}{share}", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()


class TrainingDisplay(Bar):
    """Shows images/s, N, loss and the time left; `show` is called once a step."""

    def __init__(self, console: Console):
        self.console = console
        self.bar = Progress(
            TextColumn("[bold]{task.percentage:3.0f}%"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("train", total=1.0, text="the first steps …")
        self.started: tuple[float, float] | None = None  # (progress, seconds) when this process began
        self.last: dict[str, Any] | None = None

    def show(self, state: TrainState, progress: float, record: dict[str, Any] | None) -> None:
        self.started = self.started or (progress, state.seconds)
        self.last = record or self.last
        if self.last is None or (record is None and not self.console.is_terminal):
            return
        gained, spent = progress - self.started[0], state.seconds - self.started[1]
        left = format_time((1 - progress) * spent / gained) if gained > 0 else "?"
        text = (
            f"step {state.step:,} · N {self.last.get('levels', '–')} · loss {self.last['loss']:.4g} · "
            f"{self.last['images_per_second']:,.0f} images/s · {left} left"
        )
        if self.console.is_terminal:
            self.bar.update(self.task, completed=progress, text=text)
        elif record is not None:
            self.console.print(f"{100 * progress:3.0f} %  {text}", highlight=False)


class DataProgress(Bar):
    """A bar for images that are being worked on; called with how many of how many are done."""

    def __init__(self, text: str = "decoding images", *, total: int | None = None, quiet: bool = False) -> None:
        self.quiet = quiet
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            transient=True,
            disable=quiet or not sys.stdout.isatty(),
        )
        self.task = self.bar.add_task(text, total=total)

    def __call__(self, done: int, total: int | None) -> None:
        self.advance(done, total)


class DownloadProgress(Bar):
    """A bar for a file that is on its way; called with how many of how many bytes have come."""

    def __init__(self, name: str, size: int) -> None:
        columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
        self.bar = Progress(*columns, transient=True, disable=not sys.stdout.isatty())
        self.task = self.bar.add_task(name, total=size)

    def __call__(self, done: int, total: int) -> None:
        self.advance(done, total)
