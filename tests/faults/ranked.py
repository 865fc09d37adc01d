"""One rank of a small run, for torchrun: `ranked.py FOLDER [key=value …]`; `nan=STEP often=1` spoils its last rank."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import tiny_config
from rich.console import Console

from ict.data import feed
from ict.experiment import run
from ict.objectives.ict import ImprovedConsistencyTraining
from ict.training.interrupt import Stopped


def main() -> None:
    folder = Path(sys.argv[1])
    options = {key: json.loads(value) for key, value in (pair.split("=") for pair in sys.argv[2:])}
    nan, often = options.pop("nan", None), options.pop("often", 1)
    objective = {"curriculum": options.pop("curriculum", "exponential")}
    rank, count = (int(os.environ.get(name, usual)) for name, usual in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if nan is not None and rank == count - 1:
        spoil(range(nan, nan + often))
    note_images(folder.parent / f"{folder.name}-images-{rank}")
    training = {"steps": 24, "batch": 16, "log_every": 1, "save_every": 3, "keep": 2, "snapshots": 1} | options
    config = tiny_config(net={"dropout": 0.0}, training=training, objective=objective)
    try:
        run(config, folder, device="cpu", resume="auto", console=Console(width=200))
    except Stopped as stop:
        sys.exit(stop.code)


def spoil(steps: range) -> None:
    """Not after the run has gone back: then it draws from another seed."""
    original = ImprovedConsistencyTraining.__call__

    def spoiled(self, model, images, labels, place):
        loss = original(self, model, images, labels, place)
        return type(loss)(
            loss.per_sample * (float("nan") if place.number in steps and place.seed == 0 else 1), loss.stats
        )

    ImprovedConsistencyTraining.__call__ = spoiled


def note_images(path: Path) -> None:
    """Write down which images this rank takes."""
    original = feed.Resident.take

    def noted(self, step):
        with path.open("a") as file:
            print(step, *self.order(step).tolist(), file=file)
        return original(self, step)

    feed.Resident.take = noted


if __name__ == "__main__":
    main()
