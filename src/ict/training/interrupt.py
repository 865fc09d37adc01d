"""Ctrl-C that does not tear a step apart."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self


class Interrupt:
    """Ctrl-C waits for the end of the step; a second one stops at once."""

    def __init__(self, say: Callable[[str], None]):
        self.say, self.asked = say, False

    def __enter__(self) -> Self:
        self.installed = threading.current_thread() is threading.main_thread()
        if self.installed:
            self.before = signal.signal(signal.SIGINT, self.handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self.installed:
            signal.signal(signal.SIGINT, self.before)

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.say("finishing the step, then saving; press Ctrl-C again to stop at once without that")
