"""What a run will do, said before it starts: which N it reaches and when, and whether it is long enough for that."""

from dataclasses import dataclass

from ict.config import Config
from ict.curriculum import CURRICULA, stages
from ict.objectives import OBJECTIVES
from ict.objectives.denoise_first import warm_up
from ict.objectives.ict import ImprovedConsistencyTraining
from ict.reading import choose
from ict.training.budget import Budget

# Adam's second moment needs many steps to follow the jump of the gradient at each doubling of N.
SHORT_STAGE = 100
ENDLESS = 10**9


@dataclass(frozen=True)
class Plan:
    """Stretches of constant N: (start, N), counted like the budget in steps or in milliseconds."""

    stages: list[tuple[int, int]]
    total: int
    timed: bool
    asked: int  # the N that a long run of this recipe ends with
    first: int = 0  # where the pairs begin: before, it denoises

    @classmethod
    def of(cls, config: Config, budget: Budget) -> "Plan":
        section = config.objective
        _, total = budget.progress(0, 0.0)
        first = warm_up(total, share=section.denoise)
        if not has_grid(section.kind):
            return cls([(first, 0)], total, budget.steps is None, 0, first)
        curriculum = choose("objective.curriculum", section.curriculum, CURRICULA)
        found = stages(curriculum, max(1, total - first), s0=section.s0, s1=section.s1)
        # What a long run would end with: an exponential one from s0 = 10 to s1 = 19 never leaves 11.
        asked = curriculum(ENDLESS - 1, ENDLESS, s0=section.s0, s1=section.s1)
        return cls([(first + start, n) for start, n in found], total, budget.steps is None, asked, first)

    @property
    def reached(self) -> int:
        return self.stages[-1][1]

    def describe(self) -> str:
        """One line: where N starts and ends, and where it changes."""
        if not self.first:
            return self.describe_pairs()
        return f"denoising, drawn from all of them; from {self.when(self.first)} on {self.describe_pairs()}"

    def when(self, at: int) -> str:
        return f"{at / 1000:.0f} s" if self.timed else f"step {at:,}"

    def describe_pairs(self) -> str:
        first, last = self.stages[0][1], self.stages[-1]
        if first == 0:
            return "drawn from all of them"
        if len(self.stages) == 1:
            return f"N = {first} throughout"
        if len(self.stages) > 12:
            return f"N rises from {first} to {self.reached}, its last value from {self.when(last[0])} on"
        return f"N = {first}" + "".join(f" → {n} ({self.when(start)})" for start, n in self.stages[1:])

    def warning(self, *, steps: int | None = None) -> str | None:
        """Why the run is too short for the N that it asks for, if it is; `steps` is an estimate when time bounds it."""
        steps = steps if self.timed else self.total
        if self.reached < 0.9 * self.asked:
            return (
                f"the run is too short for N = {self.asked}: it ends with N = {self.reached}; "
                f"train longer or lower objective.s1"
            )
        if steps is not None:
            steps = round(steps * (1 - self.first / max(1, self.total)))
            if self.first and steps < SHORT_STAGE:
                return f"only about {steps} steps follow the denoising: train longer or lower objective.denoise"
        if steps is not None and 1 < len(self.stages) <= 16 and steps / len(self.stages) < SHORT_STAGE:
            return (
                f"each of the {len(self.stages)} values of N gets only about {steps / len(self.stages):.0f} steps; "
                f"below {SHORT_STAGE} the optimiser hardly settles: train longer or lower objective.s1"
            )
        return None


def has_grid(kind: str) -> bool:
    """Whether an objective's levels are those of a grid of N, as in consistency training; others draw from all."""
    found = OBJECTIVES.get(kind)
    return isinstance(found, type) and issubclass(found, ImprovedConsistencyTraining)
