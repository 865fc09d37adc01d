"""Line charts as SVG text: no plotting library, sharp at any size, coloured by the page's own style sheet."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 22, 14, 40


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One curve; y on a logarithmic scale where asked, x always linear."""

    xs: Sequence[float]
    ys: Sequence[float]
    x_name: str
    y_name: str
    log: bool = False
    steps: bool = False  # a staircase: y holds until the next x
    y_ticks: Sequence[float] = ()

    def svg(self) -> str:
        if not self.xs:
            return '<p class="note">nothing was logged</p>'
        ticks = self.y_ticks or (_log_ticks(self.ys) if self.log else _linear_ticks(0, max(self.ys)))
        low, high = min(*ticks, *self.ys), max(*ticks, *self.ys)
        x_ticks = _linear_ticks(0, max(self.xs))
        right = max(x_ticks[-1], *self.xs)

        def px(x: float) -> float:
            return LEFT + (WIDTH - LEFT - RIGHT) * x / (right or 1)

        def py(y: float) -> float:
            a, b, c = (math.log(v) for v in (low, y, high)) if self.log else (low, y, high)
            return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ((b - a) / (c - a) if c > a else 0.5)

        lines = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(self.y_name)} over '
            f'{html.escape(self.x_name)}">'
        ]
        for tick in ticks:
            y = py(tick)
            lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
        for tick in x_ticks:
            lines.append(
                f'<text x="{px(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_number(tick)}</text>'
            )
        lines.append(
            f'<text class="name" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">'
            f"{html.escape(self.x_name)}</text>"
        )
        lines.append(f'<path class="curve" d="{self._path(px, py)}"/></svg>')
        return "\n".join(lines)

    def _path(self, px, py) -> str:
        points = [(px(x), py(y)) for x, y in zip(self.xs, self.ys, strict=True)]
        path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
        for x, y in points[1:]:
            path += f" H{x:.1f} V{y:.1f}" if self.steps else f" L{x:.1f},{y:.1f}"
        return path


def _linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that span [low, high]."""
    span = (high - low) or 1.0
    unit = 10 ** math.floor(math.log10(span / count))
    step = next(unit * m for m in (1, 2, 5, 10) if span / (unit * m) <= count)
    return [low + step * i for i in range(math.floor(span / step + 1e-9) + 1)]


def _log_ticks(ys: Sequence[float]) -> list[float]:
    """Round numbers around the data: the coarsest set of which at least three lie inside, or the finest."""
    low, high = min(ys), max(ys)
    ticks: list[float] = []
    inside: list[float] = []
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for mantissas in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        ticks = [m * 10.0**k for k in decades for m in mantissas]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) >= 3:
            break
    below, above = [tick for tick in ticks if tick < low][-1:], [tick for tick in ticks if tick > high][:1]
    return below + inside + above


def _number(value: float) -> str:
    for limit, suffix in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / float(limit if suffix == 'M' else 1e3):g}{suffix}"
    return f"{value:g}"
