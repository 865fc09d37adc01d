"""One-step image generators: improved consistency training (iCT).

>>> import ict
>>> generator = ict.load("runs/digits")          # doctest: +SKIP
>>> images = generator.sample(16, seed=0)        # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ict.config import Config
    from ict.experiment import run
    from ict.model import ConsistencyModel
    from ict.recipes import load_recipe
    from ict.sampling import Generator, load

__all__ = ["Config", "ConsistencyModel", "Generator", "load", "load_recipe", "run"]

_HOMES = {
    "Config": "ict.config",
    "ConsistencyModel": "ict.model",
    "Generator": "ict.sampling",
    "load": "ict.sampling",
    "load_recipe": "ict.recipes",
    "run": "ict.experiment",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `import ict` and `ict --help` do not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ict' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
