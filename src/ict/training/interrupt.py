"""Signals that do not tear a step apart: Ctrl-C, a scheduler's SIGTERM, its early warning (SIGUSR1)."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

ONE_REQUEST = 5.0  # seconds in which several signals other than Ctrl-C are one
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(KeyboardInterrupt):
    """The run was asked to stop; `code` is what the process leaves with, as a shell counts it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


class Interrupt:
    """A signal waits for the end of the step; a second one stops at once."""

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self.asked: int | None = None  # which signal

    def __enter__(self) -> Self:
        self.installed = threading.current_thread() is threading.main_thread()
        self.before = {number: signal.signal(number, self.handle) for number in SIGNALS} if self.installed else {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        if self.asked is not None:
            if self.repeated(number):
                return
            raise Stopped(number)
        self.asked, self.since = number, time.monotonic()
        again = "press Ctrl-C again" if number == signal.SIGINT else "a second signal is needed"
        with contextlib.suppress(RuntimeError):  # the signal may have come while something was being printed
            self.say(
                f"{signal.Signals(number).name}: finishing the step, then saving; {again} to stop at once without that"
            )

    def repeated(self, number: int) -> bool:
        """Whether a further signal is the same request: schedulers send it to many processes, torchrun passes it on.

        torchrun kills its ranks by itself when it has waited long enough.
        """
        return "TORCHELASTIC_RUN_ID" in os.environ or (
            number != signal.SIGINT and time.monotonic() - self.since < ONE_REQUEST
        )
