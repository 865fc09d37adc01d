"""A data set of the Hugging Face `datasets` library: hf:owner/name, hf:owner/name@configuration, or hf:./folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ict.data.pile import Entry, Listing
from ict.reading import ConfigError, require

PREFIX = "hf:"


@dataclass(frozen=True, kw_only=True)
class HubSet:
    """The column of images of one split, with the column of classes where there is one."""

    source: str
    split: str
    rows: Any  # datasets.Dataset
    images: str
    labels: str | None

    @classmethod
    def open(cls, source: str, split: str) -> "HubSet":
        rows = open_rows(source.removeprefix(PREFIX), split)

        import datasets

        columns = rows.features
        images = [name for name, kind in columns.items() if isinstance(kind, datasets.Image)]
        labels = [name for name, kind in columns.items() if isinstance(kind, datasets.ClassLabel)]
        require(bool(images), f"data.source = {source!r} has no column of images, only {', '.join(columns)}")
        rows = rows.cast_column(images[0], datasets.Image(decode=False))  # the bytes; they are decoded here
        return cls(source=source, split=split, rows=rows, images=images[0], labels=labels[0] if labels else None)

    @property
    def classes(self) -> tuple[str, ...] | None:
        return None if self.labels is None else tuple(self.rows.features[self.labels].names)

    def stamp(self) -> str:
        return f"{self.source}\0{self.split}\0{self.rows._fingerprint}\n"

    def count(self) -> int | None:
        return len(self.rows)

    def entries(self) -> Listing:
        names = self.classes
        columns = [name for name in (self.images, self.labels) if name is not None]
        for place, row in enumerate(self.rows.select_columns(columns)):
            number = row[self.labels] if self.labels else None
            image, name = row[self.images], f"{self.split}[{place}]"
            if image is None or (names is not None and (number is None or not 0 <= number < len(names))):
                yield Entry(name, "", 0), "no image in this row" if image is None else f"no class (label {number})"
                continue
            label = names[number] if names is not None and number is not None else ""
            yield entry_of(name, label, image)


def entry_of(name: str, label: str, image: dict[str, Any]) -> tuple[Entry, str | None]:
    """An image in the set, or in a file beside it."""
    if image["bytes"] is not None:
        return Entry(name, image["path"] or "", len(image["bytes"]), None, label, image["bytes"]), None
    path = Path(image["path"] or "")
    if not path.is_file():
        return Entry(name, str(path), 0), f"its file {path} is not there"
    return Entry(name, str(path), path.stat().st_size, None, label), None


def open_rows(name: str, split: str) -> Any:
    """One split, from a folder that `datasets` has saved, or from wherever it finds that name."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("data.source = hf:… needs the datasets library: pip install 'ict[datasets]'") from error
    folder, configuration = Path(name).expanduser(), ""
    if not folder.exists():
        name, _, configuration = name.partition("@")
        folder = Path(name).expanduser()
    try:
        if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(str(folder))
            if isinstance(found, datasets.DatasetDict):
                return found[split]
            held = str(found.split or "train")
            require(held == split, f"{folder} holds the split {held!r} alone")
            return found
        place = str(folder) if folder.exists() else name
        return datasets.load_dataset(place, configuration or None, split=split)
    except Exception as error:  # the library throws many kinds, from deep inside
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        raise ConfigError(
            f"data.source = {PREFIX}{name}, data.split = {split!r} cannot be opened ({reason})"
        ) from error
