"""How long a recipe takes to start: the first time, when its kernels are compiled, and the second.

    PYTHONPATH=src python benchmarks/starts.py RECIPE [KEY=VALUE ...]

Each start is a process of its own that trains ten steps and writes its model and page; both share a cache for compiled
code that is empty before the first. The set is decoded before. Printed: when each line of a start came, the seconds of
both, and what took longest in a third one, under a profiler.
"""

import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ict.data import load_images
from ict.recipes import find_recipe, load_recipe

STEPS, SHOWN = 10, 25


def start(recipe: str, keys: list[str], folder: Path, *, cache: Path, profile: Path | None = None) -> float:
    """Seconds of one start, whose lines are printed with the time at which they came."""
    watched = [] if profile is None else ["-m", "cProfile", "-o", str(profile)]
    changes = [part for key in ["training.snapshots=0", *keys] for part in ("--set", key)]
    asked = ["train", recipe, "--out", str(folder), "--overwrite", "--steps", str(STEPS), *changes]
    compiled = {"TRITON_CACHE_DIR": str(cache / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    begun = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *watched, "-m", "ict", *asked], env=os.environ | compiled | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{time.perf_counter() - begun:7.1f} s  {line.rstrip()}", flush=True)
    if process.returncode:
        sys.exit(f"ict {' '.join(asked)}: exit status {process.returncode}")
    return time.perf_counter() - begun


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    recipe, keys = sys.argv[1], sys.argv[2:]
    load_images(load_recipe(find_recipe(recipe), keys).data)
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        seconds = []
        for name in ("first", "second"):
            print(f"the {name} start:")
            seconds.append(start(recipe, keys, folder / "run", cache=folder / "cache"))
        first, second = seconds
        print(f"{recipe}: first {first:.1f} s, second {second:.1f} s, {second / first:.2f} of it")
        print("under a profiler:")
        start(recipe, keys, folder / "run", cache=folder / "cache", profile=folder / "profile")
        pstats.Stats(str(folder / "profile")).sort_stats("cumulative").print_stats("ict|torch|triton", SHOWN)


if __name__ == "__main__":
    main()
