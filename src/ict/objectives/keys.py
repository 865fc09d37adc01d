"""Which keys of [objective] matter to a recipe, and whether those that do not are at least spelled right."""

from collections.abc import Mapping
from dataclasses import fields

from ict.config import Config, ObjectiveConfig
from ict.curriculum import CURRICULA
from ict.distance import DISTANCES, huber_c
from ict.noise import INDEX_DISTRIBUTIONS
from ict.objectives import find_method
from ict.reading import choose, to_dict
from ict.solvers import SOLVERS
from ict.weighting import WEIGHTINGS

NAMES: dict[str, Mapping[str, object]] = {
    "curriculum": CURRICULA,
    "index": INDEX_DISTRIBUTIONS,
    "weighting": WEIGHTINGS,
    "distance": DISTANCES,
    "solver": SOLVERS,
}


def check_names(section: ObjectiveConfig) -> None:
    """That the names of parts which a method has no use for are known, too: it looks only at its own."""
    for key in NAMES.keys() - find_method(section).keys:
        choose(f"objective.{key}", getattr(section, key), NAMES[key])


def used_keys(config: Config) -> dict[str, object]:
    """The keys of [objective] that matter to a recipe, with what c comes to where it is left out."""
    objective = config.objective
    used = {"kind", "coupling", *find_method(objective).keys}
    if "index" not in used or objective.index != "uniform" or objective.denoise:
        used |= {"p_mean", "p_std"}
    if "distance" in used:
        used |= {"pseudo_huber": {"c"}, "lpips": {"lpips_net", "lpips_weights"}}.get(objective.distance, set())
    used |= {"gap_power"} if "weighting" in used and objective.weighting == "inverse_gap" else set()
    used |= {"couple_above"} if objective.coupling == "batch" else set()
    used |= {"mu0"} if objective.teacher == "ema" else set()
    used |= {"denoise"} if objective.denoise else set()
    found = {"c": f"{huber_c(config.data.channels * config.data.image_size**2):.4g}", **to_dict(objective)}
    return {key.name: found[key.name] for key in fields(objective) if key.name in used and key.name in found}


def idle_keys(config: Config) -> list[str]:
    """The keys of [objective] that a recipe sets and its method has no use for."""
    used, usual = used_keys(config), to_dict(ObjectiveConfig())
    return [key for key, value in to_dict(config.objective).items() if key not in used and value != usual.get(key)]
