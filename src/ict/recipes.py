"""Where recipes are: beside the code in a checkout, inside the package when installed; or a path of the user's."""

from pathlib import Path

from ict.config import ConfigError, suggest

HOMES = (Path(__file__).parents[2] / "recipes", Path(__file__).parent / "recipes")


def list_recipes() -> dict[str, Path]:
    """Names and paths of the recipes that come with ict."""
    return {path.stem: path for home in HOMES for path in sorted(home.glob("*.toml"))}


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
