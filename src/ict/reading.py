"""Reading what people write: errors that name the fix and suggest what was meant, dicts that become dataclasses.

Nothing here imports torch, so that the command line can check recipes at once.
"""

import dataclasses
import difflib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A recipe, path or option that cannot be used; the message names it and the fix."""


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def printable(text: str) -> str:
    """Without characters that would move a terminal's cursor or change its colours."""
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def choose(key: str, name: str, table: Mapping[str, T]) -> T:
    """The entry of a family's dict that a recipe names."""
    if name not in table:
        raise ConfigError(f"{key} = {name!r} is not known{suggest(name, table)}; choose from {', '.join(table)}")
    return table[name]


def bind(function: Callable[..., T], section: Any) -> Callable[..., T]:
    """Fill a function's keyword-only parameters from the keys of the same names in a section of the recipe."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and hasattr(section, p.name)]
    return functools.partial(function, **{name: getattr(section, name) for name in names})


_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


def parse_duration(key: str, text: str) -> float:
    """Seconds in "90s", "3m", "1h30m", "45"."""
    found = _DURATION.fullmatch(text.strip().lower())
    seconds = sum(float(n) * unit for n, unit in zip(found.groups(), (3600, 60, 1), strict=True) if n) if found else 0.0
    require(seconds > 0, f"{key} = {text!r} is not a length of time: write it like 90s, 3m or 1h30m")
    return seconds


def from_dict(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build a (nested) config dataclass; unknown keys and wrong types are errors that name the key."""
    require(isinstance(values, Mapping), f"{path.rstrip('.') or cls.__name__} must be a section of keys")
    hints = typing.get_type_hints(cls)
    needed = [f.name for f in dataclasses.fields(cls) if _has_no_default(f) and f.name not in values]  # type: ignore
    require(not needed, f"{path}{needed[0] if needed else ''} is missing")
    arguments = {}
    for key, value in values.items():
        where = f"{path}{key}"
        if key not in hints:
            what = "section" if isinstance(value, Mapping) else "key"
            raise ConfigError(f"unknown {what} {where!r}{suggest(key, hints)}; here are: {', '.join(sorted(hints))}")
        arguments[key] = _convert(hints[key], value, where)
    return cls(**arguments)


def _has_no_default(entry: dataclasses.Field) -> bool:
    return entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, Mapping), f"{where} is a section: write [{where}] and its keys below it")
        return from_dict(typing.cast(type, hint), value, f"{where}.")
    if isinstance(hint, types.UnionType):  # only ever `T | None`
        return None if value is None else _convert(typing.get_args(hint)[0], value, where)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        require(isinstance(value, list | tuple), f"{where} = {value!r} must be a list of {_NAMES[item]}s")
        return tuple(_convert(item, one, where) for one in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        require(abs(value) < 2**1023, f"{where} is too large a number")
        value = float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(
            f"{where} = {value!r} must be a {_NAMES[hint]}, not a {_NAMES.get(type(value), type(value).__name__)}"
        )
    require(hint is not float or abs(value) < float("inf"), f"{where} = {value!r} must be finite")
    return value


_NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "section", list: "list"}


def to_dict(config: Any) -> dict[str, Any]:
    """The plain dict of a config; keys that are left out (None) stay out, as TOML has no word for them."""
    out: dict[str, Any] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if dataclasses.is_dataclass(value):
            out[entry.name] = to_dict(value)
        elif value is not None:
            out[entry.name] = list(value) if isinstance(value, tuple) else value
    return out
