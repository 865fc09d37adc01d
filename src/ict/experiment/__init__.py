"""One run from recipe to report: hangs log, samples, checkpoints and the page on the loop's yield."""

from ict.experiment.main import run
from ict.experiment.parts import Run

__all__ = ["Run", "run"]
