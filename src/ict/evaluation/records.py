"""eval.json: what was scored, how, and with what result; and the published numbers that stand beside it."""

import json
from pathlib import Path
from typing import Any

from ict.files import locked, write_atomically
from ict.reading import ConfigError, require

FORMAT = "ict-eval-1"
Record = dict[str, Any]
# A second score of the same thing replaces the first.
IDENTITY = ("model", "run", "step", "ema", "sigmas", "samples", "seeds", "features", "weights", "real")

IN_TRAINING = "in training"  # the model of a record that was made on the way

# Tables 2 and 3 of the paper: name, network calls, scores.
PUBLISHED: dict[str, list[tuple[str, int, dict[str, float]]]] = {
    "cifar10": [
        ("CT (2023)", 1, {"FID": 8.70, "IS": 8.49}),
        ("CT (2023)", 2, {"FID": 5.83, "IS": 8.85}),
        ("CD (2023)", 1, {"FID": 3.55, "IS": 9.48}),
        ("CD (2023)", 2, {"FID": 2.93, "IS": 9.75}),
        ("iCT", 1, {"FID": 2.83, "IS": 9.54}),
        ("iCT", 2, {"FID": 2.46, "IS": 9.80}),
        ("iCT-deep", 1, {"FID": 2.51, "IS": 9.76}),
        ("iCT-deep", 2, {"FID": 2.24, "IS": 9.89}),
        ("EDM", 35, {"FID": 2.04, "IS": 9.84}),
    ],
    "imagenet64": [
        ("CT (2023)", 1, {"FID": 13.0, "precision": 0.71, "recall": 0.47}),
        ("CT (2023)", 2, {"FID": 11.1, "precision": 0.69, "recall": 0.56}),
        ("CD (2023)", 1, {"FID": 6.20, "precision": 0.68, "recall": 0.63}),
        ("CD (2023)", 2, {"FID": 4.70, "precision": 0.69, "recall": 0.64}),
        ("iCT", 1, {"FID": 4.02, "precision": 0.70, "recall": 0.63}),
        ("iCT", 2, {"FID": 3.20, "precision": 0.73, "recall": 0.63}),
        ("iCT-deep", 1, {"FID": 3.25, "precision": 0.72, "recall": 0.63}),
        ("iCT-deep", 2, {"FID": 2.77, "precision": 0.74, "recall": 0.62}),
        ("ADM", 250, {"FID": 2.07, "precision": 0.74, "recall": 0.63}),
    ],
}


def read_records(path: Path) -> list[Record]:
    """The records of an eval.json; none if there is no such file."""
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT:
            raise ConfigError(f"{path} was written by another version: move it away")
        records = [{**record} for record in found["records"]]
        if not all(record.keys() >= {*IDENTITY, "scores"} for record in records):
            raise ValueError("a record that is not whole")
        return records
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is damaged ({error!r}): move it away") from error


def add_record(path: Path, record: Record) -> None:
    """Add a record to the file, in the place of one about the same thing; several processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock")):
        others = [
            old
            for old in read_records(path)
            if other_way(old, record) or any(old.get(key) != record.get(key) for key in IDENTITY)
        ]
        write_atomically(path, json.dumps({"format": FORMAT, "records": [*others, record]}, indent=1).encode())


def check_place(path: Path) -> None:
    """Whether records can be added to a file, before there are any."""
    require(not path.is_dir(), f"{path} is a folder: give a file for the scores")
    read_records(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock")):
        pass


def same_measure(one: Record, other: Record) -> bool:
    """Whether two records differ in the model's step alone, so that their scores can be compared."""
    return all(one.get(key) == other.get(key) for key in IDENTITY if key != "step")


def other_way(one: Record, other: Record) -> bool:
    """Whether two records are of different moments of a run: of other steps, or before and after it has gone back."""
    return (one.get("step"), one.get("attempt", 0)) != (other.get("step"), other.get("attempt", 0))


def published_rows(source: str, names: list[str]) -> list[tuple[str, int, dict[str, float]]]:
    """Rows of the paper about a set, where they have any of these scores."""
    rows = PUBLISHED.get(source, [])
    return [row for row in rows if any(name in row[2] for name in names if name in ("FID", "IS"))]


def show_number(name: str, value: float) -> str:
    """A score with the digits that mean something."""
    if name.startswith(("KID", "KD")):
        return f"{value:.5f}"
    return f"{value:.3f}" if name in ("precision", "recall", "nearest", "copies") else f"{value:.2f}"


def main_scores(scores: dict[str, float]) -> dict[str, float]:
    """Without deviations, which stand beside their score."""
    return {name: value for name, value in scores.items() if not name.endswith((" deviation", " over seeds"))}


def score_names(records: list[Record]) -> list[str]:
    """Every score that any of the records has, in their order."""
    return list(dict.fromkeys(name for record in records for name in main_scores(record["scores"])))


def with_spread(name: str, scores: dict[str, float], *, subsets: bool = True) -> str:
    """A score, with its deviation over seeds, or else over subsets."""
    if name not in scores:
        return ""
    spread = scores.get(f"{name} over seeds", scores.get(f"{name} deviation") if subsets else None)
    text = show_number(name, scores[name])
    return text if spread is None else f"{text} ± {show_number(name, spread)}"
