"""Data out of a pickle, without running it.

A pickle is a little program. Here it is only read: its instructions build lists, dicts and texts, and a call that it
asks for becomes a note of what would have been called, with what. Nothing is imported, nothing is called.
"""

import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np


class NotPlain(ValueError):
    """A pickle that holds more than plain data and arrays of bytes."""


@dataclass
class Call:
    """What a pickle would have called."""

    function: Any
    arguments: Any
    state: Any = None


@dataclass(frozen=True)
class Name:
    """What a pickle would have imported."""

    text: str


PLAIN = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8",
}  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
SILENT = {"PROTO", "FRAME", "STOP"}
MARK = object()
SHORT = 1000  # characters of a key; longer ones stay notes, so that no text is copied again and again


def read_plain(data: bytes) -> Any:
    """Whatever the pickle holds: plain Python values, and `Call` where it would have called something."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for operation, argument, _ in pickletools.genops(data):
            take(operation.name, argument, stack, memo)
        (result,) = stack
    except NotPlain:
        raise
    except Exception as error:  # whatever nonsense may lead to
        raise NotPlain(f"a damaged pickle: {type(error).__name__}: {error}") from error
    return result


def take(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    """One instruction."""
    if name in PLAIN:
        stack.append(argument)
    elif name in CONSTANTS:
        stack.append(CONSTANTS[name])
    elif name in ("EMPTY_LIST", "EMPTY_DICT"):
        stack.append([] if name == "EMPTY_LIST" else {})
    elif name == "MARK":
        stack.append(MARK)
    elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
        memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
    elif name in ("GET", "BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        count = int(name[-1])
        stack[-count:] = [tuple(stack[-count:])]
    elif name in ("TUPLE", "LIST", "DICT"):
        items = since_mark(stack)
        stack.append(tuple(items) if name == "TUPLE" else items if name == "LIST" else pairs(items))
    elif name in ("APPEND", "APPENDS"):
        items = [stack.pop()] if name == "APPEND" else since_mark(stack)
        stack[-1].extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else since_mark(stack)
        stack[-1].update(pairs(items))
    elif name == "GLOBAL":
        stack.append(Name(argument))
    elif name == "STACK_GLOBAL":
        function, module = stack.pop(), stack.pop()
        stack.append(Name(f"{module} {function}"))
    elif name == "REDUCE":
        arguments, function = stack.pop(), stack.pop()
        text = function == Name("_codecs encode") and arguments[1:] == ("latin1",) and len(arguments[0]) <= SHORT
        stack.append(arguments[0].encode("latin-1") if text else Call(function, arguments))
    elif name == "BUILD":
        state = stack.pop()
        stack[-1].state = state
    elif name not in SILENT:
        raise NotPlain(f"a pickle with the instruction {name}")


def since_mark(stack: list[Any]) -> list[Any]:
    items = []
    while (item := stack.pop()) is not MARK:
        items.append(item)
    return items[::-1]


def pairs(items: list[Any]) -> dict[Any, Any]:
    if not all(isinstance(key, str | bytes) for key in items[::2]):  # a tuple of tuples of … takes long to hash
        raise NotPlain("a dict whose keys are not texts")
    return dict(zip(items[::2], items[1::2], strict=True))


def as_bytes(value: Any) -> bytes:
    """A string of Python 2, or bytes."""
    if isinstance(value, Call) and value.function == Name("_codecs encode"):
        value = value.arguments[0]
    if not isinstance(value, (str, bytes)):
        raise NotPlain("something else where bytes should be")
    return value.encode("latin-1") if isinstance(value, str) else value


def as_array(value: Any) -> np.ndarray:
    """An array of bytes that the pickle would have made NumPy build -> uint8."""
    try:
        _, shape, kind, fortran, content = value.state
        maker = value.function.text in ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
        if maker and kind.function == Name("numpy dtype") and as_bytes(kind.arguments[0]) == b"u1" and not fortran:
            return np.frombuffer(as_bytes(content), dtype=np.uint8).reshape(shape)
    except (AttributeError, ValueError, TypeError, IndexError) as error:
        raise NotPlain("something else where an array of bytes should be") from error
    raise NotPlain("something else where an array of bytes should be")
