"""The run's log: one JSON object a line, each the mean over the steps since the line before."""

import json
import time
from pathlib import Path
from typing import Any

import torch

from ict.config import ConfigError
from ict.files import write_atomically
from ict.training.loop import TrainState


class TrainingFailed(RuntimeError):
    """The run cannot go on; the message says why and what to try."""


class RunLog:
    """Appends to RUN/log.jsonl every `every` steps. Two runs of one seed differ only in the fields about time."""

    TIMES = ("seconds", "images_per_second")

    def __init__(self, path: Path, *, every: int, batch: int):
        self.path, self.every, self.batch = path, every, batch
        self.count = 0
        self.loss, self.gradient = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        self.since = time.monotonic()

    def step(self, state: TrainState) -> dict[str, Any] | None:
        """Take a step in; gives the record when one was written. Losses stay on the device until then."""
        self.loss = self.loss.to(state.loss.device) + state.loss.double()
        self.gradient = self.gradient.to(state.loss.device) + state.gradient.double()
        self.count += 1
        if state.step % self.every and state.step != 1:
            return None
        now = time.monotonic()
        record = {
            "step": state.step,
            "images": state.step * self.batch,
            **state.stats,
            "loss": float(self.loss) / self.count,
            "gradient": float(self.gradient) / self.count,
            "lr": state.lr,
            "seconds": round(state.seconds, 3),
            "images_per_second": round(self.count * self.batch / max(1e-9, now - self.since), 1),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.loss, self.gradient, self.count, self.since = self.loss * 0, self.gradient * 0, 0, now
        if not torch.isfinite(torch.tensor([record["loss"], record["gradient"]])).all():
            raise TrainingFailed(
                f"the loss became {record['loss']} (gradient norm {record['gradient']}) by step {state.step}: lower "
                "training.lr or raise training.lr_warmup; the last checkpoint is from before"
            )
        return record

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the lines to come."""
        return {"count": self.count, "loss": float(self.loss), "gradient": float(self.gradient)}

    def resume(self, state: dict[str, Any], step: int) -> None:
        """Go on as the log was at `step`: later lines, written before the run broke off, are dropped."""
        self.count = state["count"]
        self.loss, self.gradient = (torch.tensor(state[k], dtype=torch.float64) for k in ("loss", "gradient"))
        kept = [json.dumps(record) + "\n" for record in read_log(self.path) if record["step"] <= step]
        write_atomically(self.path, "".join(kept).encode())


def read_log(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a log; a last line that was cut off is passed over."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ConfigError(f"{path}, line {number} is not JSON: remove the line") from None
    return records
