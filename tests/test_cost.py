import io
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import diffusion_file, step_of, tiny_config
from rich.console import Console
from torch.autograd import forward_ad

from ict.config import Config, ObjectiveConfig
from ict.cost import measure, meta_model
from ict.info import describe_recipe
from ict.model import ModelSpec, build_model
from ict.nets.unet import UNet
from ict.objectives import OBJECTIVES, build_objective
from ict.objectives.keys import used_keys
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


READ: set[str] = set()


class Watched(ObjectiveConfig):
    """Remembers which of its keys were read."""

    def __getattribute__(self, name):
        READ.add(name)
        return super().__getattribute__(name)


KINDS = [*OBJECTIVES, "cd by euler"]


def take_a_step(kind: str, folder: Path) -> tuple[Config, Counter, set[str]]:
    """A step of a method: its recipe, how often which net was called (a derivative is two calls), the keys it read."""
    learns = {"edm": "diffusion", "meanflow": "meanflow"}.get(kind, "consistency")
    net = {"net": {"intervals": learns == "meanflow", "dropout": 0.0}, "data": {"classes": 0}}
    keys: dict[str, Any] = {"kind": kind.split()[0], "solver": "euler" if "euler" in kind else "heun"}
    if keys["kind"] == "cd":
        keys["teacher_model"] = str(diffusion_file(folder))
    config = tiny_config(**net, objective=keys)
    watched = Watched(**vars(config.objective))
    model = build_model(ModelSpec.from_config(config, ()))
    calls: Counter = Counter()

    def count(module, *_):
        if isinstance(module, UNet):
            calls["ours" if module is model.net else "diffusion"] += 2 if forward_ad._current_level >= 0 else 1

    READ.clear()
    hook = torch.nn.modules.module.register_module_forward_hook(count)
    try:
        build_objective(replace(config, objective=watched))(model, torch.zeros(4, 1, 8, 8), None, step_of(4))
    finally:
        hook.remove()
    return config, calls, set(READ)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_method_calls_is_counted(kind, tmp_path):
    config, calls, _ = take_a_step(kind, tmp_path)
    cost = measure(ModelSpec.from_config(config, ()))
    assert cost.training(config.objective) == sum(calls.values()) * cost.forward + cost.backward
    console = Console(file=io.StringIO(), width=300)
    console.print(describe_recipe(config, tflops=1))
    (line,) = [line for line in console.file.getvalue().splitlines() if line.startswith("training")]
    as_calls = f" (counted as {calls['diffusion']} calls)" if calls["diffusion"] > 1 else ""
    assert ("teacher forward" in line) == (kind.split()[0] in ("ict", "cd", "ect"))
    assert (f"diffusion model forward{as_calls}" in line) == (kind.split()[0] == "cd")
    assert ("derivative" in line) == (kind in ("continuous", "sct", "meanflow"))


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_info_shows_the_keys_that_a_method_reads(kind, tmp_path):
    config, _, read = take_a_step(kind, tmp_path)
    keys = set(vars(config.objective))
    by_trainer = {"ict": {"score", "teacher"}, "ect": {"score"}, "cd": {"teacher"}}.get(kind, set())
    shown, switched_off = set(used_keys(config)), {"denoise", "couple_above", "mu0", "lpips_net", "lpips_weights"}
    assert shown - read - {"kind", "coupling"} == by_trainer
    left_out = set(OBJECTIVES[kind].keys) - shown  # in the recipe: the method has its own
    assert read & keys - shown == left_out | (read & switched_off) and left_out <= {"power"}


def test_info_shows_what_c_comes_to_and_nothing_that_is_switched_off():
    assert used_keys(load_recipe(find_recipe("cifar10-ict"))) == {
        "kind": "ict", "curriculum": "exponential", "s0": 10, "s1": 1280, "index": "lognormal", "p_mean": -1.1,
        "p_std": 2.0, "weighting": "inverse_gap", "gap_power": 1.0, "distance": "pseudo_huber", "c": "0.02993",
        "score": "sample", "coupling": "independent", "teacher": "student",
    }  # fmt: skip
    keys = {"coupling": "batch", "distance": "lpips", "teacher": "ema", "index": "uniform"}
    assert "p_mean" in used_keys(tiny_config(objective={"index": "uniform", "denoise": 0.5}))  # levels to denoise
    other = set(used_keys(tiny_config(data={"classes": 0}, objective=keys)))
    assert {"couple_above", "lpips_net", "mu0"} < other and not {"c", "p_mean", "p_std"} & other
