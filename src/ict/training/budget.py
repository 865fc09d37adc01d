"""How long a run lasts. Curriculum and learning rate are functions of its progress, done / total."""

from dataclasses import dataclass

from ict.config import TrainingConfig
from ict.reading import ConfigError, parse_duration


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A number of steps, or of seconds of wall-clock time."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def from_config(cls, training: TrainingConfig) -> "Budget":
        if training.budget is not None:
            return cls(seconds=parse_duration("training.budget", training.budget))
        if training.steps is not None:
            return cls(steps=training.steps)
        if training.images is not None:
            return cls(steps=-(-training.images // training.batch))
        raise ConfigError("the recipe does not say how long to train: set training.steps, images or budget (like 3m)")

    def progress(self, step: int, seconds: float) -> tuple[int, int]:
        """(done, total) in steps, or in whole milliseconds when time bounds the run; done never passes total."""
        if self.steps is not None:
            return min(step, self.steps), self.steps
        assert self.seconds is not None
        total = max(1, round(self.seconds * 1000))
        return min(int(seconds * 1000), total), total

    def finished(self, step: int, seconds: float) -> bool:
        done, total = self.progress(step, seconds)
        return done >= total
