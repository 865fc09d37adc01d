"""Every method, trained on the digits and judged, in half a minute or so of one core each, on a net of half the width:
`make test-slow`."""

import io

import numpy as np
import pytest
from helpers import fit_judge, verdict
from rich.console import Console

from ict.experiment import run
from ict.recipes import find_recipe, load_recipe
from ict.sampling import Generator, load
from ict.training.log import TrainingFailed

pytestmark = [pytest.mark.slow, pytest.mark.training]
SAMPLES = 500
CONTINUOUS = ["objective.kind=continuous", "objective.distance=squared_l2", "training.lr_warmup=0.1"]
PARTS_OF_2023 = [
    "objective.teacher=ema", "objective.index=uniform", "objective.weighting=uniform", "objective.curriculum=sqrt",
    "objective.distance=squared_l2", "objective.s0=2",
]  # fmt: skip
METHODS = {
    "ict": ["training.steps=300"],
    "ct of 2023": [*PARTS_OF_2023, "objective.s1=8", "training.steps=400"],  # a large N needs a long run
    "ect": ["objective.kind=ect", "objective.c=0.01", "objective.stages=4", "training.steps=400"],
    "edm": ["objective.kind=edm", "objective.p_mean=-1.2", "objective.p_std=1.2", "training.steps=400"],
    "continuous": [*CONTINUOUS, "training.steps=300"],
    "sct": ["objective.kind=sct", "objective.p_mean=-1.0", "objective.p_std=1.4", "training.steps=300"],
    "meanflow": ["objective.kind=meanflow", "net.intervals=true", "objective.p_mean=-1.0", "training.steps=200"],
}


def trained_by(changes: list[str], folder) -> Generator:
    quick = ["net.channels=16", "training.snapshots=0", "training.save_every=100000", "training.rollbacks=0"]
    config = load_recipe(find_recipe("digits"), [*quick, *changes])
    run(config, folder, device="cpu", console=Console(file=io.StringIO()))
    return load(folder)


@pytest.fixture(scope="module")
def judge():
    return fit_judge()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_draws_digits_that_can_be_read(method, judge, tmp_path):
    check_readable(method, trained_by(METHODS[method], tmp_path / "run"), judge)


def test_a_distilled_model_draws_digits_that_can_be_read(judge, tmp_path):
    trained_by(METHODS["edm"], tmp_path / "teacher")
    file = tmp_path / "teacher" / "model.safetensors"
    distils = ["objective.kind=cd", f"objective.teacher_model={file}", f"training.start={file}", "objective.s1=20"]
    check_readable("cd", trained_by([*distils, "training.steps=200"], tmp_path / "run"), judge)


def check_readable(method: str, generator: Generator, judge) -> None:
    labels = [i % 10 for i in range(SAMPLES)]
    found = verdict(judge, generator.sample(SAMPLES, seed=2, label=labels))
    right = np.mean(found.argmax(axis=1) == labels)
    print(f"{method}: confidence {found.max(axis=1).mean():.3f}, of the asked class {right:.1%}")
    assert found.max(axis=1).mean() >= 0.8 and right >= 0.7


def test_a_sensitive_embedding_diverges_in_continuous_time(tmp_path):
    """§3.1, Fig. 1b: the same run as above, but for a Fourier scale of 16 in place of 0.02."""
    with pytest.raises(TrainingFailed, match="diverged"):
        trained_by([*CONTINUOUS, "training.steps=300", "net.fourier_scale=16"], tmp_path / "run")
