"""What objectives learn of a mixture in the plane is the exact map, to a stated distance."""

import io
import time

import pytest
from rich.console import Console

from ict.evaluation.maps import map_distance
from ict.experiment import run
from ict.recipes import find_recipe, load_recipe
from ict.sampling import load

# Root mean square over the noise; the mixture itself is 0.56 wide, so 0.56 is what an answer of 0 would have.
# With the seed of the recipe each ends at three quarters to five sixths of its bound.
STEADY = ["training.lr=4e-3", "training.lr_warmup=0.1"]  # of methods by a tangent
CT = ["teacher=ema", "curriculum=sqrt", "index=uniform", "weighting=uniform", "distance=squared_l2"]  # of 2023
BOUNDS = {
    "ict": (0.11, []),
    "ct": (0.18, [*(f"objective.{part}" for part in CT), "objective.s1=20"]),  # a finer grid needs longer
    "ect": (0.12, ["objective.kind=ect"]),
    "cd": (0.05, ["objective.kind=cd", "objective.s1=40"]),  # by the exact score
    "edm": (0.045, ["objective.kind=edm", "objective.p_std=1.5"]),  # solved in 40 steps
    "continuous": (0.12, ["objective.kind=continuous", "objective.distance=squared_l2", *STEADY]),
    # Weights and lengths by a sample's own loss move the answer where dimensions are few: both are off.
    "sct": (
        0.12,
        ["objective.kind=sct", "objective.power=0", "objective.floor=3", "objective.warmup=0.2", *STEADY],
    ),
    "meanflow": (0.1, ["objective.kind=meanflow", "net.intervals=true", "objective.power=0"]),
}
SHORT = ["training.steps=1000", "training.batch=256", "training.snapshots=0"]


@pytest.mark.slow
@pytest.mark.training
@pytest.mark.parametrize("kind", BOUNDS)
def test_the_learned_map_is_the_exact_one(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("ict.experiment.main.write_report", lambda *_, device: None)  # its maps take seconds
    bound, keys = BOUNDS[kind]
    begun, used = time.monotonic(), time.process_time()
    config = load_recipe(find_recipe("toy2d"), [*keys, *SHORT])
    path = run(config, tmp_path / kind, device="cpu", console=Console(file=io.StringIO(), width=200))
    distance = map_distance(load(path))
    took = f"{time.monotonic() - begun:.0f} s, {time.process_time() - used:.0f} of a core"
    print(f"{kind}: {distance:.4f} from the exact map, in {took}")
    assert distance < bound
