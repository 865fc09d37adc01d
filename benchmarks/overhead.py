"""What guard, log and background saving cost a training step.

    PYTHONPATH=src python benchmarks/overhead.py [recipe] [batch] [steps]

By turns, a bare loop and a whole run's work; the whole one saves once in its stretch. `steps` is the length of a
stretch. The share of saving is that of one checkpoint every 1,000 steps, as the recipes have it.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ict.bench import synchronise
from ict.config import Config
from ict.data import Images
from ict.device import make_deterministic, pick_device, place
from ict.model import ModelSpec, build_model
from ict.ranks import ALONE
from ict.recipes import find_recipe, load_recipe
from ict.training.budget import Budget
from ict.training.guard import Guard
from ict.training.log import RunLog
from ict.training.loop import TrainState, new_state, train
from ict.training.saver import Saver

EVERY = 1000


class Blind(Guard):
    """A guard that looks at nothing."""

    def watch(self, loss, *, scale) -> None:
        pass

    def check(self, *, step, levels, scaled, kind) -> bool:
        return True


def stretch(steps: Iterator[TrainState], count: int, device: torch.device, log: RunLog | None) -> float:
    """Seconds a step."""
    synchronise(device)
    begun = time.perf_counter()
    for _ in range(count):
        state = next(steps)
        if log is not None:
            log.step(state)
    synchronise(device)
    return (time.perf_counter() - begun) / count


def main() -> None:
    recipe, batch, count = sys.argv[1:2] or ["cifar10-ict"], sys.argv[2:3] or ["128"], sys.argv[3:4] or ["30"]
    config = load_recipe(find_recipe(recipe[0]), [f"training.batch={batch[0]}", "training.accumulate=1"])
    device = pick_device("auto")
    make_deterministic(config.training.deterministic)
    images, spec, state = prepare(config, device)
    with tempfile.TemporaryDirectory() as home:
        log = RunLog(Path(home) / "log.jsonl", every=config.training.log_every, batch=config.training.batch)
        saver = Saver(Path(home), spec, config, print, step=0)
        loops = {}
        for kind in (Blind, Guard):
            loops[kind] = train(config, state, images, Budget(steps=10**6), guard=kind(config, ALONE, device))
        for steps in loops.values():
            stretch(steps, 3, device, None)
        times: dict[str, list[float]] = {"bare": [], "whole": [], "while saving": [], "copy": [], "write": []}
        for _ in range(3):
            times["bare"].append(stretch(loops[Blind], int(count[0]), device, None))
            times["whole"].append(stretch(loops[Guard], int(count[0]), device, log))
        for _ in range(2):
            synchronise(device)
            begun = time.perf_counter()
            saver.save(state, {"log": log.state()})
            times["copy"].append(time.perf_counter() - begun)
            taken, spent = 0, 0.0
            while saver.thread is not None and saver.thread.is_alive():
                spent += stretch(loops[Guard], 1, device, log)
                taken += 1
            times["write"].append(time.perf_counter() - begun)
            times["while saving"].append(spent - taken * statistics.median(times["whole"]))
            saver.wait()
    bare, whole = statistics.median(times["bare"]), statistics.median(times["whole"])
    disk = statistics.median(times["write"])
    copy, slowed = statistics.median(times["copy"]), max(0.0, statistics.median(times["while saving"]))
    saving = (copy + slowed) / EVERY / bare
    print(f"{config.name}, batch {config.training.batch}, on {device}")
    print(f"a bare step                             {1000 * bare:9.2f} ms")
    print(f"with guard and log                      {1000 * whole:9.2f} ms  ({whole / bare - 1:+.2%})")
    print(f"a save: the run waits for the copy      {1000 * copy:9.2f} ms, the disk takes {disk:.1f} s")
    print(f"  steps meanwhile are slower by         {1000 * slowed:9.2f} ms in all")
    print(f"  once every {EVERY:,} steps                             ({saving:+.2%})")
    print(f"together                                             ({whole / bare - 1 + saving:+.2%})")


def prepare(config: Config, device: torch.device) -> tuple[Images, ModelSpec, TrainState]:
    count, shape = 4 * config.training.batch, (config.data.channels, config.data.image_size, config.data.image_size)
    names = tuple(map(str, range(max(1, config.data.classes))))
    pixels = torch.randint(0, 256, (count, *shape), dtype=torch.uint8)
    images = Images(pixels=pixels, labels=torch.zeros(count).long(), class_names=names)
    spec = ModelSpec.from_config(config, names)
    model = build_model(spec)
    place(model, device)
    return images, spec, new_state(config, model)


if __name__ == "__main__":
    main()
