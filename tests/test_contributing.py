"""The example in CONTRIBUTING.md works as it is printed."""

import re
from pathlib import Path

import torch
from helpers import SpyNet, step_of, tiny_config

from ict import weighting
from ict.model import ConsistencyModel
from ict.objectives import build_objective

ROOT = Path(__file__).parents[1]


def test_the_example_of_a_new_weighting():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    before = dict(weighting.WEIGHTINGS)
    try:
        exec(example, vars(weighting))
        config = tiny_config(objective={"weighting": "inverse_level"})
        model = ConsistencyModel(SpyNet(), config.noise, image_shape=(1, 8, 8))
        loss = build_objective(config)(model, torch.rand(4, 1, 8, 8), None, step_of(4))
        assert loss.per_sample.shape == (4,) and torch.isfinite(loss.per_sample).all()
    finally:
        weighting.WEIGHTINGS.clear()
        weighting.WEIGHTINGS.update(before)
