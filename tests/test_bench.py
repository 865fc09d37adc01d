import io
import subprocess
import sys

import torch
from helpers import tiny_config
from rich.console import Console

from ict.bench import bench, table


def test_a_bench_measures_every_part_and_says_so():
    stages = []
    config = tiny_config(training={"batch": 8, "accumulate": 2})
    found = bench(config, torch.device("cpu"), batch=None, steps=2, say=stages.append)
    assert found.step > 0 and found.ceiling > 0 and found.precision == "float32" and found.batch == 8
    assert list(found.parts) == [
        "noise", "teacher", "student", "backward", "optimiser and averages", "data", "the rest",
    ]  # fmt: skip
    assert 0.5 < sum(found.parts.values()) / found.step < 4 and found.sampling.keys() == {1, 2}
    assert len(stages) >= 5
    console = Console(file=io.StringIO(), width=200)
    console.print(table(found))
    text = console.file.getvalue()
    for word in ("images/s", "TFLOP/s", "% of a large matrix product", "teacher", "samples in 2 steps"):
        assert word in text, word


def test_the_command_takes_any_recipe_and_refuses_nonsense():
    command = [sys.executable, "-m", "ict", "bench", "digits", "--device", "cpu"]
    done = subprocess.run([*command, "--batch", "4", "--steps", "1"], capture_output=True, text=True)
    assert done.returncode == 0 and "images/s" in done.stdout, done.stderr
    wrong = subprocess.run([*command, "--steps", "0"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "--steps 0: use at least 1" in wrong.stderr
