import io
import itertools
import subprocess
import sys
import time

import pytest
import torch
from helpers import diffusion_file, tiny_config
from rich.console import Console

from ict.bench import WARM, bench, bench_steps, table
from ict.objectives.score import DataScore
from ict.reading import ConfigError
from ict.recipes import find_recipe, load_recipe


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


@pytest.mark.parametrize("steps", [3, 6, 20])
def test_what_happens_once_among_the_steps_does_not_count(steps, monkeypatch):
    """A kernel that is compiled late, say."""
    pauses = itertools.chain([0.0] * WARM, [0.5], itertools.repeat(0.02))
    monkeypatch.setattr("ict.bench.train", lambda *given, **rest: map(time.sleep, pauses))
    found = bench_steps(tiny_config(), torch.device("cpu"), steps=steps, peak=1.0)[0]
    assert 0.02 <= found.step < 0.05


PARTS = {
    "edm": [], "ict": ["teacher"], "ect": ["teacher"], "cd": ["diffusion model", "teacher"],
    "sct": ["derivative"], "meanflow": ["derivative"], "continuous": ["derivative"],
}  # fmt: skip


@pytest.mark.parametrize("kind", PARTS)
def test_the_parts_are_those_that_a_method_has(kind, tmp_path):
    net = {"intervals": True} if kind == "meanflow" else {}
    keys = {"teacher_model": str(diffusion_file(tmp_path))} if kind == "cd" else {}
    config = tiny_config(net=net, objective={"kind": kind, **keys}, training={"batch": 4})
    found = bench(config, torch.device("cpu"), batch=None, steps=2, say=lambda text: None)
    update = ["optimiser and averages", "data", "the rest"]
    assert list(found.parts) == ["noise", *PARTS[kind], "student", "backward", *update]


def test_the_score_of_a_set_is_that_of_as_many_images_as_the_set_has(monkeypatch):
    """With those of some batches alone a step would look faster than it is."""
    seen = []
    original = DataScore.noise
    monkeypatch.setattr(DataScore, "noise", lambda self, *rest: seen.append(len(self.images)) or original(self, *rest))
    config = tiny_config(objective={"score": "data", "denoise": 0.5}, training={"batch": 4})
    found = bench(config, torch.device("cpu"), batch=None, steps=2, say=lambda text: None)
    assert set(seen) == {1797} and found.parts["score of 1,797 images"] > 0
    monkeypatch.setattr("ict.bench.random_images", None)
    large = load_recipe(find_recipe("imagenet64-ict"), ["objective.score=data", "data.classes=0"])
    with pytest.raises(ConfigError, match=r"whole training set in memory, 58\.6 GiB"):  # before it is made
        bench(large, torch.device("cpu"), batch=None, steps=2, say=lambda text: None)


def test_the_command_takes_any_recipe_and_refuses_nonsense():
    command = [sys.executable, "-m", "ict", "bench", "digits", "--device", "cpu"]
    done = subprocess.run([*command, "--batch", "4", "--steps", "1"], capture_output=True, text=True)
    assert done.returncode == 0 and "images/s" in done.stdout, done.stderr
    wrong = subprocess.run([*command, "--steps", "0"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "--steps 0: use at least 1" in wrong.stderr
