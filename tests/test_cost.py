import io

import pytest
import torch
from helpers import tiny_config
from rich.console import Console

from ict.config import ObjectiveConfig
from ict.cost import measure, meta_model
from ict.info import USED, describe_recipe, used_keys
from ict.model import ModelSpec
from ict.objectives import OBJECTIVES
from ict.recipes import find_recipe, load_recipe


def spec_of(name: str) -> ModelSpec:
    config = load_recipe(find_recipe(name))
    return ModelSpec.from_config(config, tuple(map(str, range(config.data.classes))))


def test_the_papers_net_costs_what_others_measured():
    """42.4 GFLOP forward, 169.5 for a training image: counted elsewhere for a sister of 55.7M parameters."""
    cost = measure(spec_of("cifar10-ict"))
    assert cost.forward / 1e9 == pytest.approx(42.4, rel=0.01)
    assert cost.training(ObjectiveConfig()) / 1e9 == pytest.approx(169.5, rel=0.01)


def test_cost_grows_with_the_width_as_it_must():
    small, large = (
        measure(ModelSpec.from_config(tiny_config(net={"channels": c, "attention": []}), ())) for c in (8, 16)
    )
    assert 3.5 < large.forward / small.forward < 4.1  # inner convolutions grow with the square of the width
    assert 3.5 < small.training(ObjectiveConfig()) / small.forward < 4.1
    assert 1.9 < large.activations / small.activations < 2.1


def test_activations_are_what_the_backward_pass_keeps():
    """Against the bytes that autograd really saves on the CPU."""
    from torch.autograd.graph import saved_tensors_hooks

    from ict.model import build_model

    spec = ModelSpec.from_config(tiny_config(), tuple("0123456789"))
    model, seen = build_model(spec).train(), {}
    weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(
            torch.zeros(1, 1, 8, 8), torch.ones(1), torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
        )
    assert measure(spec).activations == pytest.approx(sum(size for _, size in seen.values()), rel=0.15)


def test_nothing_is_allocated():
    assert all(p.is_meta for p in meta_model(spec_of("imagenet64-ict-deep")).parameters())


def test_training_memory():
    cost = measure(ModelSpec.from_config(tiny_config(), ()))
    assert cost.training_memory(averages=2) == 4 * cost.parameters * 6


@pytest.mark.parametrize(
    ("keys", "calls", "said"),
    [
        ({"kind": "ict"}, 2, "teacher forward"),
        ({"kind": "edm"}, 1, "forward and backward"),
        ({"kind": "cd", "teacher_model": "x"}, 4, "2 calls of the diffusion model"),
        ({"kind": "sct"}, 3, "a derivative along the path"),
    ],
)
def test_what_a_method_calls_is_counted(keys, calls, said):
    """Forward passes, the student's among them."""
    config = tiny_config(objective=keys)
    cost = measure(ModelSpec.from_config(config, ()))
    assert cost.training(config.objective) == calls * cost.forward + cost.backward
    console = Console(file=io.StringIO(), width=300)
    console.print(describe_recipe(config, tflops=1))
    (line,) = [line for line in console.file.getvalue().splitlines() if line.startswith("training")]
    assert said in line


def test_info_shows_the_keys_that_matter():
    """c as it comes out, nothing of other methods."""
    assert set(USED) == set(OBJECTIVES)
    assert used_keys(load_recipe(find_recipe("cifar10-ict"))) == {
        "kind": "ict", "curriculum": "exponential", "s0": 10, "s1": 1280, "index": "lognormal", "p_mean": -1.1,
        "p_std": 2.0, "weighting": "inverse_gap", "distance": "pseudo_huber", "c": "0.02993", "score": "sample",
        "coupling": "independent", "teacher": "student",
    }  # fmt: skip
    batch = tiny_config(
        data={"classes": 0}, objective={"coupling": "batch", "distance": "lpips", "teacher": "ema", "denoise": 0.0}
    )
    assert {"couple_above", "lpips_net", "mu0"} < set(used_keys(batch)) and "c" not in used_keys(batch)
