"""Muon: the direction that it takes, which weights take it, and that a run with it resumes to the bit."""

import pytest
import torch
from helpers import check_resume, same_weights, tiny_config, trained_weights
from torch import nn

from ict.model import ModelSpec, build_model
from ict.reading import ConfigError
from ict.recipes import find_recipe, load_recipe
from ict.training.muon import SIZE, Muon, as_matrix, as_weight, orthogonal
from ict.training.optimiser import build_optimiser

SHAPES = [(3, 24, 24), (2, 16, 90), (2, 90, 16), (1, 1, 7)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_it_is_nearly_the_nearest_orthogonal_matrix(shape, size):
    x = random(*shape)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    x, nearest = u @ torch.diag_embed(s.clamp_min(0.03 * s.amax())) @ v, u @ v
    found = orthogonal(size * x)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6 and values.max() < 1.25
    assert (found * nearest).flatten(1).sum(1).div(nearest.flatten(1).norm(dim=1) ** 2).min() > 0.6
    assert torch.nn.functional.cosine_similarity(found.flatten(1), nearest.flatten(1)).min() > 0.97


def test_nothing_stays_nothing():
    assert torch.equal(orthogonal(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_kernel_is_a_matrix_and_back(layout):
    weight = random(6, 4, 3, 3).to(memory_format=layout)
    matrix = as_matrix(weight)
    assert matrix.shape == (6, 36) and torch.equal(as_weight(matrix, weight), weight)
    assert (matrix.data_ptr() == weight.data_ptr()) == (layout == torch.channels_last)


class Layers(nn.Module):
    """Two matrices alike, one that is not, a kernel, and what is not a matrix inside."""

    def __init__(self):
        super().__init__()
        self.dense_in = nn.Linear(2, 16)
        self.one, self.two, self.three = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 40)
        self.conv, self.norm = nn.Conv2d(8, 12, 3), nn.GroupNorm(2, 8)
        for number, parameter in enumerate(self.parameters()):
            parameter.data = random(*parameter.shape, seed=number)

    def give(self, seed: int, scale: float = 1.0) -> None:
        for number, parameter in enumerate(self.parameters()):
            parameter.grad = scale * random(*parameter.shape, seed=1000 * seed + number)


OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "foreach": True}
INSIDE = {"one.weight", "two.weight", "three.weight", "conv.weight"}


def test_matrices_move_as_torchs_muon_moves_them_and_the_rest_as_its_radam():
    ours, theirs = Layers(), Layers()
    named = dict(theirs.named_parameters())
    flat = {name: nn.Parameter(named[name].detach().flatten(1)) for name in INSIDE}
    muon = torch.optim.Muon(
        flat.values(), lr=1e-2, weight_decay=0.0, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    radam = torch.optim.RAdam([named[name] for name in named if name not in INSIDE], **OPTIONS)
    optimiser, start = Muon(ours, **OPTIONS), {name: each.detach().clone() for name, each in named.items()}
    for seed in range(8):
        ours.give(seed), theirs.give(seed)
        for name, parameter in flat.items():
            parameter.grad = named[name].grad.flatten(1)
        optimiser.step(), muon.step(), radam.step()
    for name, parameter in ours.named_parameters():
        if name in INSIDE:  # which computes in bfloat16
            way, expected = parameter.flatten(1) - start[name].flatten(1), flat[name] - start[name].flatten(1)
            assert (way - expected).norm() < 0.03 * expected.norm(), name
        else:
            assert torch.equal(parameter, named[name]), name


def test_a_step_has_the_size_of_adams_whatever_the_gradients():
    found = []
    for scale in (1e-6, 1.0, 1e6):
        layers = Layers()
        start = {name: parameter.detach().clone() for name, parameter in layers.named_parameters()}
        layers.give(0, scale)
        Muon(layers, **OPTIONS).step()
        found.append({name: each.detach() - start[name] for name, each in layers.named_parameters() if name in INSIDE})
    for name in INSIDE:
        assert found[1][name].square().mean().sqrt().item() == pytest.approx(SIZE * 1e-2, rel=0.2)
        for other in (found[0], found[2]):
            assert torch.allclose(other[name], found[1][name], atol=1e-6)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_steps_lie_in_memory_as_the_weights_do_and_where_they_lay_before(layout):
    layers = Layers().to(memory_format=layout)
    optimiser, places = Muon(layers, **OPTIONS), set()
    for seed in range(3):
        for number, parameter in enumerate(layers.parameters()):
            parameter.grad = torch.empty_like(parameter).copy_(random(*parameter.shape, seed=100 * seed + number))
        optimiser.prepare()
        for parameter, _, step in optimiser.ready:
            assert step.stride() == parameter.stride()
        places.add(tuple(step.data_ptr() for _, _, step in optimiser.ready))
        optimiser.step()
    assert len(places) == 1


def test_layouts_do_not_matter():
    plain, last = Layers(), Layers().to(memory_format=torch.channels_last)
    optimisers = [Muon(each, **OPTIONS) for each in (plain, last)]
    for seed in range(3):
        for each, optimiser in zip((plain, last), optimisers, strict=True):
            each.give(seed)
            optimiser.step()
    assert torch.allclose(plain.conv.weight, last.conv.weight, atol=1e-6)
    assert last.conv.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("recipe", ["digits", "cifar10-ict", "imagenet64-ict", "toy2d"])
def test_what_meets_the_world_is_not_turned(recipe):
    config = load_recipe(find_recipe(recipe), ["training.optimiser=muon"])
    with torch.device("meta"):
        model = build_model(ModelSpec.from_config(config, tuple(map(str, range(config.data.classes)))))
    optimiser = build_optimiser(model, config.training)
    rest, inside = (set(map(id, group["params"])) for group in optimiser.param_groups)
    names = {name: id(parameter) in inside for name, parameter in model.named_parameters()}
    assert not rest & inside and len(rest | inside) == len(names)
    turned = [name for name, is_inside in names.items() if is_inside]
    assert all(name.endswith(".weight") and "norm" not in name and "embed" not in name for name in turned)
    assert not any(part in name for name in turned for part in ("_in.", "_out."))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert not any(config.data.channels in shapes[name][:2] for name in turned)  # NCSN++ reads the image more than once
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(sizes[name] for name in turned) > (0.25 if recipe == "toy2d" else 0.8) * sum(sizes.values())


def test_a_run_with_it_resumes_to_the_bit(tmp_path):
    whole = check_resume(tiny_config(training={"optimiser": "muon"}), tmp_path)
    assert not same_weights(trained_weights(tiny_config(), tmp_path / "radam"), whole)


def test_other_names_and_shards_are_refused():
    with pytest.raises(ConfigError, match=r"training\.optimiser = 'adam': use radam, muon"):
        tiny_config(training={"optimiser": "adam"})
    with pytest.raises(ConfigError, match="shard_optimiser is for radam alone"):
        tiny_config(training={"optimiser": "muon", "shard_optimiser": True})
