"""The examples in CONTRIBUTING.md work as they are printed."""

import io
import re
from pathlib import Path

import torch
from helpers import SpyNet, step_of, tiny_config
from rich.console import Console

from ict import weighting
from ict.experiment import run
from ict.info import describe_recipe
from ict.model import ConsistencyModel
from ict.objectives import OBJECTIVES, build_objective
from ict.sampling import load
from ict.training.log import read_log

ROOT = Path(__file__).parents[1]


def example(word: str) -> str:
    """The one block of code in which a word occurs."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (found,) = (block for block in blocks if word in block)
    return found


def test_the_example_of_a_new_weighting():
    before = dict(weighting.WEIGHTINGS)
    try:
        exec(example("def inverse_level"), vars(weighting))
        config = tiny_config(objective={"weighting": "inverse_level"})
        model = ConsistencyModel(SpyNet(), config.noise, image_shape=(1, 8, 8))
        loss = build_objective(config)(model, torch.rand(4, 1, 8, 8), None, step_of(4))
        assert loss.per_sample.shape == (4,) and torch.isfinite(loss.per_sample).all()
    finally:
        weighting.WEIGHTINGS.clear()
        weighting.WEIGHTINGS.update(before)


def test_the_example_of_a_new_objective_trains(tmp_path, monkeypatch):
    names = {"OBJECTIVES": OBJECTIVES}
    exec(example("class HalvedLevels"), names)
    monkeypatch.setitem(OBJECTIVES, "halved", None)  # what the entry changes is put back
    exec(example('OBJECTIVES["halved"]'), names)
    config = tiny_config(objective={"kind": "halved"}, training={"steps": 5, "log_every": 1})
    console = Console(file=io.StringIO(), width=200)
    path = run(config, tmp_path / "run", device="cpu", console=console)
    assert "noise levels: drawn from all of them" in console.file.getvalue()  # no N is announced that it does not have
    assert load(path).sample(2).isfinite().all()
    records = read_log(tmp_path / "run" / "log.jsonl")
    assert len(records) == 5 and all(record["loss"] > 0 and record["r"] > 0 for record in records)

    console.print(describe_recipe(config, tflops=1))
    assert "student forward and backward, teacher forward" in console.file.getvalue()
    assert "kind halved, p_mean -1.1, p_std 2.0, coupling independent" in console.file.getvalue()


def test_the_class_of_the_example_has_about_a_dozen_lines():
    body = example("class HalvedLevels").partition('"""\n')[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 13
