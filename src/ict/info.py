"""Tables that describe a recipe or a model file."""

from pathlib import Path

from rich.table import Table

from ict.config import Config, ConfigError, to_dict
from ict.model import ConsistencyModel, ModelSpec, build_model, read_model
from ict.training.budget import Budget
from ict.training.plan import Plan


def _table(rows: dict[str, str]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _net_rows(model: ConsistencyModel, spec: ModelSpec) -> dict[str, str]:
    parameters = sum(p.numel() for p in model.parameters())
    channels, height, width = model.image_shape
    return {
        "images": f"{height}×{width}, {'grey' if channels == 1 else 'colour'}",
        "classes": str(len(spec.class_names)) if spec.class_names else "none",
        "net": ", ".join(f"{key} {value}" for key, value in to_dict(spec.net).items()),
        "parameters": f"{parameters:,} ({parameters * 4 / 2**20:.1f} MiB in float32)",
        "noise": ", ".join(f"{key} {value:g}" for key, value in to_dict(spec.noise).items()),
        "two steps": f"σ = {spec.noise.sigma_max:g}, {spec.sigma_mid:g}",
    }


def describe_model(path: Path) -> Table:
    model, spec, origin = read_model(path)
    about = ", ".join(f"{key} {value}" for key, value in origin.items())
    return _table({"model": str(path), "from": about, **_net_rows(model, spec)})


def describe_recipe(config: Config) -> Table:
    """What a recipe will build and do; needs neither its data nor a GPU."""
    spec = ModelSpec.from_config(config, tuple(str(i) for i in range(config.data.classes)))
    objective, training = config.objective, config.training
    rows = {"recipe": config.name, "about": config.about, **_net_rows(build_model(spec), spec)}
    rows["objective"] = ", ".join(f"{key} {value}" for key, value in to_dict(objective).items())
    rows["training"] = ", ".join(f"{key} {value}" for key, value in to_dict(training).items())
    try:
        plan = Plan.of(config, Budget.from_config(training))
        rows["levels"] = plan.describe()
        if warning := plan.warning():
            rows["warning"] = warning
    except ConfigError as error:
        rows["warning"] = str(error)
    return _table(rows)
