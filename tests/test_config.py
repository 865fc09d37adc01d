import dataclasses
from pathlib import Path

import pytest
from helpers import TINY, tiny_config
from hypothesis import given
from hypothesis import strategies as st

from ict.config import Config
from ict.reading import ConfigError, bind, from_dict, parse_duration, to_dict
from ict.recipes import find_recipe, list_recipes, load_recipe, to_toml


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trainig": {}}, r"unknown section 'trainig' \(did you mean 'training'\?\)"),
        ({"training": {"learning_rat": 1}}, "unknown key 'training.learning_rat'"),
        ({"training": {"step": 1}}, r"unknown key 'training.step' \(did you mean 'steps'\?\)"),
        ({"training": {"batch": "many"}}, "training.batch = 'many' must be a whole number, not a text"),
        ({"training": {"batch": 1.5}}, "training.batch = 1.5 must be a whole number, not a number"),
        ({"training": {"batch": True}}, "training.batch = True must be a whole number, not a true or false"),
        ({"training": {"lr": float("nan")}}, "training.lr = nan must be finite"),
        ({"training": 3}, r"write \[training\]"),
        ({"net": {"multipliers": 2}}, "net.multipliers = 2 must be a list"),
        ({"net": {"multipliers": []}}, "net.multipliers"),
        ({"net": {"dropout": 1.0}}, "net.dropout = 1.0"),
        ({"net": {"channels": 30}}, "multiple of 8"),
        ({"objective": {"s0": 20, "s1": 10}}, "objective.s0 = 20 is above objective.s1 = 10"),
        ({"objective": {"c": 0.0}}, "objective.c"),
        ({"noise": {"sigma_min": 80.0}}, "noise.sigma_min = 80.0 must be below noise.sigma_max = 80.0"),
        ({"objective": {"floor": 0.0}}, "objective.floor = 0.0: must be above 0"),
        ({"noise": {"sigma_min": 0.0}}, "noise.sigma_min = 0.0: use 1e-09 to 1,000,000"),
        ({"sampling": {"sigma_mid": 100.0}}, "sampling.sigma_mid = 100.0 must lie between"),
        ({"training": {"steps": 5, "images": 5}}, "bounded by one of them"),
        ({"training": {"budget": "soon"}}, "write it like 90s, 3m"),
        ({"training": {"batch": 10, "accumulate": 3}}, "must divide training.batch"),
        ({"training": {"ema": [0.9, 0.9]}}, "different rates"),
        ({"training": {"betas": [0.9]}}, "two numbers"),
        ({"name": "../up"}, "name = '../up'"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_nonsense_is_refused_with_the_key_and_the_fix(values, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(Config, values)


def test_a_whole_number_is_a_number():
    assert from_dict(Config, {"training": {"lr": 1}}).training.lr == 1.0


def test_configs_are_frozen(tiny):
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny.seed = 3


@given(
    st.fixed_dictionaries({"seed": st.integers(0, 2**63 - 1), "about": st.text(st.characters(codec="utf-8"))}),
    st.floats(1e-9, 1e3),
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
)
def test_a_recipe_reads_back_to_the_same_config(top, lr, multipliers):
    config = from_dict(Config, {**TINY, **top, "training": {"lr": lr}, "net": {"multipliers": multipliers}})
    import tomllib

    assert from_dict(Config, tomllib.loads(to_toml(config))) == config
    assert from_dict(Config, to_dict(config)) == config


def test_overrides(tmp_path):
    path = written(tmp_path, "[training]\nsteps = 5\n[net]\nattention = [8]\n")
    config = load_recipe(
        path, ["training.lr=3e-4", "net.attention=[]", "net.kind=unet", "seed=7", "objective.distance = l1"]
    )
    assert config.training.lr == 3e-4 and config.net.attention == () and config.seed == 7
    assert config.objective.distance == "l1"
    assert load_recipe(path, ["training.budget=3m"]).training.steps is None  # a new bound replaces the old one
    assert load_recipe(path, ["training.steps=none"]).training.steps is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.lr", "section.key=value"),
        ("=3", "section.key=value"),
        ("training.lrr=3", "did you mean 'lr'"),
        ("training.steps.more=3", "'steps' is a value"),
        ("training.batch=ten", "must be a whole number"),
    ],
)
def test_bad_overrides(override, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load_recipe(written(tmp_path, "[training]\nsteps = 5\n"), [override])


def test_a_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"recipe\.toml is not valid TOML.*line 2"):
        load_recipe(written(tmp_path, "a = 1\nb c\n"))
    (tmp_path / "recipe.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_recipe(tmp_path / "recipe.toml")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("3m", 180), ("1h30m", 5400), ("45", 45), ("1.5m", 90)])
def test_durations(text, seconds):
    assert parse_duration("x", text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "m", "3 minutes", "-3m", "1h-3m"])
def test_bad_durations(text):
    with pytest.raises(ConfigError, match="length of time"):
        parse_duration("--budget", text)


@pytest.mark.parametrize("name", sorted(list_recipes()))
def test_every_recipe_can_be_read_and_is_named_after_its_file(name):
    config = load_recipe(find_recipe(name))
    assert config.name == name and config.about


def test_recipes_are_found_by_name_path_and_run(tmp_path):
    assert find_recipe("digits") == list_recipes()["digits"]
    path = written(tmp_path, to_toml(tiny_config()))
    assert find_recipe(str(path)) == find_recipe(str(tmp_path)) == path
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        find_recipe("digit")


def test_bind_fills_keyword_parameters_from_the_section():
    def function(x, *, s0, s1, other=3):
        return x, s0, s1, other

    assert bind(function, tiny_config().objective)(1) == (1, 2, 8, 3)
