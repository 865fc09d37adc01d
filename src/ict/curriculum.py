"""How many noise levels N a step trains on (§3.4, Fig. 3b).

Every curriculum is `(step, total_steps, *, s0, s1) -> N`. A run bounded by time passes milliseconds instead of
steps: only the ratio matters, up to rounding.
"""

import math
from collections.abc import Callable, Iterator


def doubling_period(total_steps: int, *, s0: int, s1: int) -> int:
    """K' = ⌊K / (log2⌊s1/s0⌋ + 1)⌋ (§3.4), at least 1: how long each stage of `exponential` lasts."""
    return max(1, math.floor(total_steps / (math.log2(s1 // s0) + 1)))


def exponential(step: int, total_steps: int, *, s0: int, s1: int) -> int:
    """N(k) = min(s0 · 2^⌊k/K'⌋, s1) + 1 (§3.4): the choice of iCT."""
    doublings = step // doubling_period(total_steps, s0=s0, s1=s1)
    return min(s0 << min(doublings, s1.bit_length()), s1) + 1


def sqrt(step: int, total_steps: int, *, s0: int, s1: int) -> int:
    """N(k) = ⌈√(k/K · ((s1+1)² − s0²) + s0²) − 1⌉ + 1 (Table 1): the choice of 2023. Starts at s0 (2 or more)."""
    # In whole numbers: a float root just above an integer would be rounded up by ⌈ ⌉ to the next level.
    gained = _done(step, total_steps) * ((s1 + 1) ** 2 - s0**2)
    radicand = s0**2 - (-gained // max(1, total_steps))  # ⌈ ⌉ of what stands under the root
    return max(2, math.isqrt(radicand - 1) + 1)  # two levels make a pair


def constant(step: int, total_steps: int, *, s0: int, s1: int) -> int:
    """N(k) = s1 + 1."""
    return s1 + 1


def linear(step: int, total_steps: int, *, s0: int, s1: int) -> int:
    """N(k) = ⌊s0 + (s1 − s0) · k/K⌋ + 1."""
    return _between(s0, s1, _progress(step, total_steps))


def square(step: int, total_steps: int, *, s0: int, s1: int) -> int:
    """N(k) = ⌊s0 + (s1 − s0) · (k/K)²⌋ + 1."""
    return _between(s0, s1, _progress(step, total_steps) ** 2)


def cosine(step: int, total_steps: int, *, s0: int, s1: int) -> int:
    """N(k) = ⌊s0 + (s1 − s0) · (1 − cos(π k/K)) / 2⌋ + 1: half a wave, flat at both ends."""
    return _between(s0, s1, (1 - math.cos(math.pi * _progress(step, total_steps))) / 2)


def _done(step: int, total_steps: int) -> int:
    return min(max(step, 0), total_steps)


def _progress(step: int, total_steps: int) -> float:
    return _done(step, total_steps) / max(1, total_steps)


def _between(s0: int, s1: int, share: float) -> int:
    return math.floor(s0 + (s1 - s0) * share + 1e-9) + 1


def teacher_ema_2023(levels: int, *, s0: int, mu0: float) -> float:
    """μ(k) = exp(s0 · log μ0 / N(k)) (Table 1, left): the teacher's EMA rate in 2023. iCT sets it to 0."""
    return mu0 ** (s0 / levels)  # the same, and 0 for μ0 = 0


Curriculum = Callable[..., int]
CURRICULA: dict[str, Curriculum] = {
    "exponential": exponential,
    "sqrt": sqrt,
    "constant": constant,
    "linear": linear,
    "square": square,
    "cosine": cosine,
}


def stages(curriculum: Curriculum, total_steps: int, *, s0: int, s1: int) -> Iterator[tuple[int, int]]:
    """(first step, N) of every stretch of constant N in steps 0 … total_steps-1, by bisection: N never falls."""
    step, last = 0, total_steps - 1
    while step <= last:
        n = curriculum(step, total_steps, s0=s0, s1=s1)
        yield step, n
        low, high = step, last + 1  # low still has n; high does not, or lies past the end
        while high - low > 1:
            middle = (low + high) // 2
            if curriculum(middle, total_steps, s0=s0, s1=s1) == n:
                low = middle
            else:
                high = middle
        step = high
