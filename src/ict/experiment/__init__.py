"""One run from recipe to report: hangs log, samples, checkpoints and the page on the loop's yield."""

from ict.experiment.parts import Run
from ict.experiment.run import run

__all__ = ["Run", "run"]
