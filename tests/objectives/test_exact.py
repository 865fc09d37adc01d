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
BOUNDS = {
    "ict": (0.09, ["objective.kind=ict"]),
    "ect": (0.09, ["objective.kind=ect"]),
    "cd": (0.04, ["objective.kind=cd", "objective.s1=40"]),  # by the exact score
    "edm": (0.04, ["objective.kind=edm", "objective.p_std=1.5"]),  # solved in 40 steps
}


@pytest.mark.slow
@pytest.mark.training
@pytest.mark.parametrize("kind", BOUNDS)
def test_the_learned_map_is_the_exact_one(kind, tmp_path):
    bound, keys = BOUNDS[kind]
    config = load_recipe(find_recipe("toy2d"), [*keys, "training.steps=2000", "training.batch=256"])
    begun = time.monotonic()
    path = run(config, tmp_path / kind, device="cpu", console=Console(file=io.StringIO(), width=200))
    distance = map_distance(load(path))
    print(f"{kind}: {distance:.4f} from the exact map, in {time.monotonic() - begun:.0f} s")
    assert distance < bound
