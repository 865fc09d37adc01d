"""The teacher of 2023: an average of the student that has a weight of its own at each N."""

import io

import torch
from helpers import tiny_config
from rich.console import Console

from ict.data import load_images
from ict.experiment import run
from ict.files import list_checkpoints
from ict.model import ModelSpec, build_model
from ict.training.budget import Budget
from ict.training.loop import new_state, train

SONG = {"teacher": "ema", "curriculum": "sqrt", "s0": 2, "s1": 8, "weighting": "uniform", "index": "uniform"}


def quiet() -> Console:
    return Console(file=io.StringIO())


def states(config):
    images = load_images(config.data)
    state = new_state(config, build_model(ModelSpec.from_config(config, images.class_names), seed=0))
    return state, train(config, state, images, Budget(steps=12))


def test_the_target_follows_the_student_by_the_recursion():
    state, steps = states(tiny_config(objective=SONG))
    expected = {name: one.clone() for name, one in state.model.state_dict().items()}
    decays = set()
    for _ in steps:
        decay = 0.9 ** (2 / state.stats["levels"])
        decays.add(decay)
        for name, one in state.model.state_dict().items():
            expected[name] = decay * expected[name] + (1 - decay) * one
        for name, one in state.target.state_dict().items():
            assert torch.allclose(one, expected[name], atol=1e-6)
    assert len(decays) > 3  # one for each N


def test_the_teacher_is_the_target_and_not_the_student():
    """With the same draws: a target that is not the student changes the loss; one that is equal to it does not."""
    kinds = [{"teacher": "student"}, {"teacher": "ema", "mu0": 0.0}, {"teacher": "ema", "mu0": 0.9}]
    losses = []
    for kind in kinds:
        state, steps = states(tiny_config(objective=SONG | kind))
        losses.append([state.loss.item() for _ in steps])
    assert losses[0] == losses[1]
    assert losses[0][0] == losses[2][0] and losses[0][1:] != losses[2][1:]


def test_the_target_is_kept_and_a_resumed_run_is_equal_to_the_bit(tmp_path):
    models = []
    for name, stops in (("whole", [12]), ("broken", [8, 12])):
        for steps in stops:
            config = tiny_config(objective=SONG | {"curriculum": "constant"}, training={"steps": steps})
            run(config, tmp_path / name, device="cpu", resume="auto", console=quiet())
        newest = list_checkpoints(tmp_path / name)[-1]
        models.append([(newest / file).read_bytes() for file in ("target.safetensors", "student.safetensors")])
    assert models[0] == models[1] and models[0][0] != models[0][1]
