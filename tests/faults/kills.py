"""Runs that are killed again and again: `python kills.py FOLDER SEED KILLS` prints what was seen as JSON.

This process never trains: it forks one that does, so that a new life costs milliseconds and not the import of torch.

FOLDER/unbroken is one whole run. Each other run is started with resume="auto", killed at a random moment and started
again until it ends; then its weights, averages, optimiser, samples and log must be the unbroken one's to the bit.
"""

import io
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import sklearn.datasets  # noqa: F401  (what training loads is loaded once, here)
import torch
import torch._dynamo
from helpers import tiny_config
from rich.console import Console

from ict import files
from ict.config import Config
from ict.data import load_images
from ict.experiment import run
from ict.files import list_checkpoints
from ict.training import checkpoint
from ict.training.checkpoint import find_checkpoint
from ict.training.log import RunLog, read_log

EVERY = 3
TRAINING = {"steps": 60, "log_every": 1, "save_every": EVERY, "keep": 2, "snapshots": 2}


def live(config: Config, folder: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Fork a process that trains; gives its number."""
    process = os.fork()
    if process:
        return process
    try:
        prepare()
        run(config, folder, device="cpu", resume="auto", console=Console(file=io.StringIO()))
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def wait(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def result(folder: Path) -> dict[str, bytes]:
    """All that must not depend on how often a run was killed."""
    last = list_checkpoints(folder)[-1]
    found = {path.name: path.read_bytes() for path in sorted(last.iterdir()) if path.suffix != ".json"}
    found |= {path.name: path.read_bytes() for path in sorted((folder / "samples").glob("*.png"))}
    found["model"] = (folder / "model.safetensors").read_bytes()
    lines = [{k: v for k, v in line.items() if k not in RunLog.TIMES} for line in read_log(folder / "log.jsonl")]
    return found | {"log": json.dumps(lines).encode()}


def kill_at_random(folder: Path, seed: int, kills: int) -> dict[str, int]:
    config, draw = tiny_config(training=TRAINING), random.Random(seed)
    whole, broken = folder / "unbroken", folder / f"broken-{seed}"
    assert wait(live(config, whole)) == 0
    expected = result(whole)
    seen = {"kills": 0, "inside a save": 0, "runs": 0, "most steps lost": 0}
    while seen["kills"] < kills:
        shutil.rmtree(broken, ignore_errors=True)
        newest = 0
        while True:
            process = live(config, broken)
            time.sleep(draw.uniform(0.02, 1.5))
            if os.waitpid(process, os.WNOHANG) != (0, 0):
                break
            os.kill(process, signal.SIGKILL)
            if wait(process) == 0:
                break
            seen["kills"] += 1
            seen["inside a save"] += bool(list(broken.glob("checkpoints/.step-*.partial")))
            steps = [line["step"] for line in read_log(broken / "log.jsonl")]
            if list_checkpoints(broken):
                found = find_checkpoint(broken)
                assert found.passed_over == [], found.passed_over
                assert found.manifest["step"] >= newest, "a checkpoint was lost"
                newest = found.manifest["step"]
            lost = max(steps, default=0) - newest
            seen["most steps lost"] = max(seen["most steps lost"], lost)
        assert result(broken) == expected, "the end differs from the unbroken run"
        seen["runs"] += 1
    return seen


def kill_at_every_write(folder: Path, half: int) -> dict[str, int]:
    """Killed at the first, second, … operation on the disk: before it, or in the middle of it."""
    config = tiny_config(training={"steps": 6, "log_every": 1, "save_every": 2, "keep": 2, "snapshots": 1})
    whole, broken = folder / "unbroken", folder / "broken"
    assert wait(live(config, whole)) == 0
    expected, place = result(whole), 0
    while True:
        shutil.rmtree(broken, ignore_errors=True)
        code = wait(live(config, broken, lambda: die_at(place, half)))  # noqa: B023
        if code == 0:
            return {"operations": place}
        assert code == -signal.SIGKILL
        for path in list_checkpoints(broken):
            checkpoint.check_checkpoint(path)
        assert wait(live(config, broken)) == 0
        assert result(broken) == expected, f"killed at operation {place}"
        place += 1


def die_at(place: int, half: int) -> None:
    """Let the process kill itself at one of its operations on the disk."""
    count = 0

    def hooked(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def operation(*arguments: object, **options: object) -> object:
            nonlocal count
            count += 1
            if count - 1 == place:
                if half and name == "write_new":
                    path, data = arguments
                    path.write_bytes(data[: len(data) // 2])  # type: ignore
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(owner, name, operation)

    for owner in (files, checkpoint):
        for name in ("write_new", "sync_folder", "remove"):
            if hasattr(owner, name):
                hooked(owner, name)
    for owner, name in ((Path, "rename"), (Path, "replace"), (Path, "mkdir"), (shutil, "rmtree")):
        hooked(owner, name)


def main() -> None:
    torch.set_num_threads(1)
    load_images(tiny_config().data)
    folder, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    seen = kill_at_random(folder, seed, kills) if kills else kill_at_every_write(folder, seed)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
