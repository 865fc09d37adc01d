"""Recipes as TOML files: finding, reading, changing and writing them."""

import dataclasses
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ict.config import BOUNDS, Config
from ict.reading import ConfigError, from_dict, require, suggest, to_dict

# Beside the code in a checkout, inside the package when installed.
HOMES = (Path(__file__).parents[2] / "recipes", Path(__file__).parent / "recipes")


def list_recipes() -> dict[str, Path]:
    """Names and paths of the recipes that come with ict."""
    return {path.stem: path for home in HOMES for path in sorted(home.glob("*.toml"), key=lambda p: p.stem)}


def find_recipe(name: str) -> Path:
    """The recipe that a name, a path to a .toml or the folder of a run means."""
    path = Path(name)
    if path.is_file():
        return path
    if (path / "recipe.toml").is_file():
        return path / "recipe.toml"
    known = list_recipes()
    if name in known:
        return known[name]
    raise ConfigError(
        f"there is no recipe {name!r}{suggest(name, known)}: give a path to a .toml, the folder of a run, or one of "
        f"{', '.join(known)}"
    )


def to_toml(config: Config) -> str:
    """A recipe that reads back to the same config."""
    values = to_dict(config)
    top = [f"{key} = {_literal(value)}" for key, value in values.items() if not isinstance(value, dict)]
    sections = [
        "\n".join([f"\n[{key}]", *(f"{name} = {_literal(one)}" for name, one in value.items())])
        for key, value in values.items()
        if isinstance(value, dict)
    ]
    return "\n".join([*top, *sections]) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_literal(one) for one in value)}]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def load_recipe(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read a recipe and apply `a.b=value` overrides."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8: a recipe is a .toml file") from error
    except ValueError as error:  # bad TOML, or a number of thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        _apply(values, override)
    try:
        return from_dict(Config, values)
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from error


def sections_with(key: str) -> list[str]:
    """The sections of a recipe that have a key."""
    sections = {name: section for name, section in vars(Config()).items() if dataclasses.is_dataclass(section)}
    return [name for name, section in sections.items() if key in vars(section)]


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    require(bool(equals and key.strip()) and "\n" not in override, f"--set {override!r}: write it as section.key=value")
    *sections, last = key.strip().split(".")
    meant = [] if sections else sections_with(last)
    require(not meant, f"--set {override!r}: write {' or '.join(f'{section}.{last}' for section in meant)}={text}")
    for section in sections:
        values = values.setdefault(section, {})
        require(isinstance(values, dict), f"--set {override!r}: {section!r} is a value, not a section")
    if text.strip().lower() == "none":
        values.pop(last, None)
        return
    if last in BOUNDS:  # a new bound on the run replaces the recipe's
        for other in BOUNDS:
            values.pop(other, None)
    try:
        values[last] = tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        values[last] = text.strip()  # a bare word is text
