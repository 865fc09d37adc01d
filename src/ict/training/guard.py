"""Watches a run's numbers: a step that is not finite is not taken, and divergence is noticed.

Loss and gradient are watched as a whole and by noise level, over all ranks. Each figure has a fast average, of the
last steps, a slow one of when all was well, and the lowest that the slow one has been; a run has diverged when a fast
one stays far above its slow one, or very far above the lowest. The weight λ grows with N, and at a switch of N loss and
gradient may jump by up to the ratio of the two (to the power of `gap_power`): what they are measured against is raised
by it, and never lowered.
"""

import math
from collections import deque
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ict.config import Config
from ict.objectives import Loss
from ict.ranks import Ranks

BINS = 8  # of noise levels, evenly spaced in log σ
FAST, SLOW = 0.1, 0.01  # weights of a new value in the two averages
FAR = 10.0  # a run that stays so many times above what was usual has diverged
BIN_FAR = 40.0  # the same for one bin, whose few samples spread more
SETTLED = 50  # values that a slow average needs before it is believed
PATIENCE = 20  # steps that a figure has to stay far above
LOWEST = 10.0  # how many times further above the lowest than above the slow average
IN_A_ROW = 10  # steps that may be skipped one after the other
OFTEN = 0.5  # share of the last 20 or so steps that may be skipped
KEPT = 200  # steps of history that are kept as evidence
SCALE = 2.0**12  # what a loss in fp16 is first multiplied with, so that its small gradients are not rounded to zero
SCALES = (1.0, 2.0**24)
BEYOND = 3  # steps whose loss may be not finite in fp16, before the trunk leaves it
PATIENT = 1000  # steps without overflow after which twice the scale is tried


@dataclass
class Track:
    """One figure: its averages, and for how many steps it has been too high."""

    fast: float = 0.0
    slow: float = 0.0
    lowest: float = 0.0  # that the slow one has been since it is believed
    seen: int = 0
    high: int = 0

    def take(self, value: float, far: float) -> None:
        self.seen = self.seen + 1 if self.slow > 0 else 1  # what has been zero so far says nothing about the usual
        self.fast += (value - self.fast) * max(FAST, 1 / self.seen)
        settled = self.seen > SETTLED and self.slow > 0
        too_high = settled and (self.fast > far * self.slow or self.fast > LOWEST * far * self.lowest)
        self.high = self.high + 1 if too_high else 0
        if settled:
            value = min(value, 2 * self.slow)  # it must not run after what it is there to notice
        if self.high == 0:
            self.slow += (value - self.slow) * max(SLOW, 1 / self.seen)
            self.lowest = min(self.lowest, self.slow) if settled and self.lowest > 0 else self.slow

    def raise_by(self, ratio: float) -> None:
        self.slow, self.lowest = ratio * self.slow, ratio * self.lowest


@dataclass(kw_only=True)
class GuardState:
    """What a checkpoint keeps of a guard."""

    tracks: dict[str, Track] = field(default_factory=dict)
    kind: str = ""  # of loss that they are of
    levels: float = 0.0
    skipped: int = 0  # steps, over the whole run
    in_a_row: int = 0
    often: float = 0.0  # share of the last steps that were skipped
    smooth: float = 0.0  # loss over about the last 1,000 steps
    counted: int = 0  # of them
    scale: float = SCALE
    clean: int = 0  # steps since the scale was last changed
    overflows: int = 0  # steps that were lost because the scale was too high
    beyond: int = 0  # steps whose loss was not finite in fp16
    left_half: bool = False  # fp16 gave answers that are not finite, and the trunk has left it for good

    def save(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, values: dict[str, Any]) -> "GuardState":
        known = {key.name for key in fields(cls)} - {"tracks"}
        found = cls(**{name: value for name, value in values.items() if name in known})
        found.tracks = {name: Track(**one) for name, one in values["tracks"].items()}
        return found


class Guard:
    """Taken along by the loop: `begin`, `watch` each piece, `ask` for the numbers, `check` them.

    Between `ask` and `check` a GPU can be given more work: `check` waits for the numbers, not for that.
    """

    def __init__(self, config: Config, ranks: Ranks, device: torch.device):
        self.ranks, self.device = ranks, device
        self.low, self.high = math.log(config.noise.sigma_min), math.log(config.noise.sigma_max)
        section = config.objective
        self.growth = max(1.0, section.gap_power) if section.weighting == "inverse_gap" else 1.0  # λ ∝ N^growth
        self.state = GuardState()
        self.alarm: str | None = None  # why the run has to go back
        self.history: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.sums = torch.zeros(3, BINS, device=device)  # losses, gradients and samples of each bin
        self.numbers = torch.empty(2 + 3 * BINS, pin_memory=device.type == "cuda")  # of a step, where the host reads
        self.arrived = torch.cuda.Event() if device.type == "cuda" else None

    def begin(self) -> None:
        """A new step: nothing of it has been seen."""
        self.sums.zero_()

    def watch(self, loss: Loss, *, scale: Tensor | float) -> None:
        """Take in one piece of a batch, before its backward pass; `scale` makes its gradients those of one sample."""
        if loss.sigma is None:
            return
        place = ((loss.sigma.log() - self.low) / (self.high - self.low) * BINS).long().clamp(0, BINS - 1)
        inside = place[:, None] == torch.arange(BINS, device=place.device)
        self.sums[0] += spread(loss.per_sample.detach(), inside)
        self.sums[2] += inside.sum(0)
        if loss.output is not None and loss.output.requires_grad:
            loss.output.register_hook(lambda g: self.watch_gradient(g.detach(), inside, scale))

    def watch_gradient(self, g: Tensor, inside: Tensor, scale: Tensor | float) -> None:
        """The gradient with respect to the net's answer: what each noise level asks of the net."""
        self.sums[1] += spread(g.flatten(1).float().norm(dim=1) * scale, inside)

    def ask(self, loss: Tensor, gradient: Tensor) -> Tensor:
        """Send for a step's numbers, over all ranks. Whether they are finite, as the GPU will know before the host."""
        row = self.ranks.add(torch.cat((loss.detach().float().reshape(1), self.sums.flatten())))
        loss.copy_(row[0])
        row = torch.cat((row, gradient.detach().float().reshape(1)))
        self.numbers.copy_(row, non_blocking=self.arrived is not None)
        if self.arrived is not None:
            self.arrived.record(torch.cuda.current_stream(self.device))
        return row[0].isfinite() & row[-1].isfinite()

    def check(self, *, step: int, levels: float, scaled: bool = False, kind: str = "") -> bool:
        """Whether this is a step to take: its numbers are finite. The same answer on every rank; after `ask`.

        `scaled`: the trunk is in fp16, and the gradient that of a scaled loss. `kind`: that of the method's phase.
        """
        self.meet(kind)
        if self.arrived is not None:
            self.arrived.synchronize()
        numbers = self.numbers.tolist()
        total, norm, bins = numbers[0], numbers[-1], numbers[1:-1]
        good = math.isfinite(total) and math.isfinite(norm)
        losses, gradients, samples = bins[:BINS], bins[BINS : 2 * BINS], bins[2 * BINS :]
        self.history.append(
            {
                "step": step, "levels": levels, "loss": total, "gradient": norm, "skipped": not good,
                "loss_by_level": means(losses, samples), "gradient_by_level": means(gradients, samples),
            }
        )  # fmt: skip
        self.rescale(levels)
        if scaled and self.overflowed(good, total):
            return False
        self.state.often += (float(not good) - self.state.often) / 20
        if not good:
            self.skip(step)
            return False
        self.state.in_a_row = 0
        self.state.counted += 1
        self.state.smooth += (total - self.state.smooth) * max(0.001, 1 / self.state.counted)
        self.track("the loss", total, FAR)
        self.track("the gradient", norm, FAR)
        for name, values in (("the loss", losses), ("the gradient", gradients)):
            for place, value in enumerate(means(values, samples)):
                if value is not None:
                    self.track(f"{name} at {self.describe(place)}", value, BIN_FAR)
        return True

    def overflowed(self, good: bool, loss: float) -> bool:
        """Whether only the loss's scale is to blame for a gradient that is not finite; finds the highest that is not.

        Where not even the loss is finite no scale can help: after a few of these the trunk has to leave fp16.
        """
        state = self.state
        if not math.isfinite(loss):
            state.beyond += 1
            state.left_half = state.left_half or state.beyond >= BEYOND
            return False
        overflow = not good and state.scale > SCALES[0]
        state.clean = 0 if overflow else state.clean + 1
        if overflow:
            state.scale, state.overflows = state.scale / 2, state.overflows + 1
        elif state.clean >= PATIENT:
            state.scale, state.clean = min(2 * state.scale, SCALES[1]), 0
        return overflow

    def track(self, name: str, value: float, far: float) -> None:
        track = self.state.tracks.setdefault(name, Track())
        track.take(value, far)
        if track.high >= PATIENCE and self.alarm is None:
            self.alarm = (
                f"{name} has been more than {far:g} times its usual value for {track.high} steps "
                f"({track.fast:.3g}, usually {track.slow:.3g})"
            )

    def skip(self, step: int) -> None:
        self.state.skipped += 1
        self.state.in_a_row += 1
        if self.state.in_a_row >= IN_A_ROW:
            self.alarm = f"{self.state.in_a_row} steps in a row gave a loss or a gradient that is not finite"
        elif self.state.often > OFTEN:
            self.alarm = f"{self.state.often:.0%} of the last steps gave a loss or a gradient that is not finite"

    def meet(self, kind: str) -> None:
        """A loss of another kind has numbers of its own: what was usual before says nothing about it."""
        if kind != self.state.kind:
            state = self.state
            state.kind, state.scale, state.clean = kind, SCALE, 0
            state.smooth, state.counted, state.levels = 0.0, 0, 0.0
            state.tracks.clear()

    def rescale(self, levels: float) -> None:
        """Make room for the jump that a switch to a larger N may make by itself."""
        before, self.state.levels = self.state.levels, levels
        if 1 < before < levels:
            for track in self.state.tracks.values():
                track.raise_by(((levels - 1) / (before - 1)) ** self.growth)

    def figures(self) -> dict[str, Any]:
        """What is worth a place in the log: the smoothed loss, the steps skipped so far, loss and gradient by level."""
        found: dict[str, Any] = {"loss_ema": self.state.smooth, "skipped": self.state.skipped}
        for name, key in (("the loss", "loss_by_level"), ("the gradient", "gradient_by_level")):
            tracks = [self.state.tracks.get(f"{name} at {self.describe(place)}") for place in range(BINS)]
            found[key] = [None if track is None else float(f"{track.fast:.4g}") for track in tracks]
        return found

    def describe(self, place: int) -> str:
        edges = [math.exp(self.low + (self.high - self.low) * (place + end) / BINS) for end in (0, 1)]
        return f"σ from {edges[0]:.3g} to {edges[1]:.3g}"

    @property
    def calm(self) -> bool:
        """Whether nothing is out of the ordinary: only then is a checkpoint worth keeping.

        A step that was skipped may be the first to show that the one before has spoilt the weights.
        """
        return self.alarm is None and self.state.in_a_row == 0 and not any(t.high for t in self.state.tracks.values())

    def forget(self, state: GuardState) -> None:
        """Go on as the guard was at a checkpoint; what was skipped stays counted."""
        state.skipped, state.in_a_row, state.often = max(state.skipped, self.state.skipped), 0, 0.0
        state.left_half = state.left_half or self.state.left_half
        self.state, self.alarm = state, None


def spread(values: Tensor, inside: Tensor) -> Tensor:
    """Sums by bin; a value that is not finite stays in its own bin."""
    return torch.where(inside, values[:, None].float(), 0).sum(0)


def means(sums: list[float], counts: list[float]) -> list[float | None]:
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]
