"""How the time of a training step grows: with the batch, the size of the images, and the depth of the net.

    PYTHONPATH=src python benchmarks/growth.py PICTURE.png [recipe]
    PYTHONPATH=src python benchmarks/growth.py PICTURE.png TABLE.txt

Prints a table and draws it (matplotlib), or draws a table that was printed before. Random images, `[speed]` as the
recipe has it.
"""

import re
import sys
from pathlib import Path

import torch

from ict.bench import bench_steps, ceiling, machine
from ict.device import pick_device
from ict.recipes import find_recipe, load_recipe

BATCHES = (64, 128, 256, 512, 1024, 2048)
DEPTHS = (1, 2, 4, 8)
Curves = dict[str, list[tuple[int, float]]]  # what is changed -> its values, and ms a step


def main() -> None:
    picture, recipe = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cifar10-ict"
    if recipe.endswith(".txt"):
        draw(read(Path(recipe).read_text()), picture)
        return
    device = pick_device("auto")
    peak = ceiling(device, "fp16" if device.type == "cuda" else "float32")
    always = ["training.accumulate=1", "training.deterministic=false"]
    rows: list[tuple[str, int, list[str]]] = []
    rows += [("batch", n, [f"training.batch={n}"]) for n in BATCHES]
    rows += [("pixels a side", n, [f"data.image_size={n}", f"net.attention=[{n // 2}]"]) for n in (32, 64)]
    rows += [("blocks a level", n, [f"net.blocks={n}"]) for n in DEPTHS]
    curves: Curves = {}
    print(f"{machine(device)}; {recipe}, {peak / 1e12:.0f} TFLOP/s in a large product")
    print("what             value   ms a step  images/s  TFLOP/s  share  memory GiB")
    for name, value, sets in rows:
        base = ["training.batch=128"] if name != "batch" else []
        try:
            config = load_recipe(find_recipe(recipe), [*always, *base, *sets])
            found = bench_steps(config, device, steps=9, peak=peak)[0]
        except torch.OutOfMemoryError:
            print(f"{name:16} {value:6d}   out of memory")
            continue
        rate = found.batch / found.step
        print(
            f"{name:16} {value:6d} {1000 * found.step:11.1f} {rate:9.0f} {rate * found.operations / 1e12:8.1f} "
            f"{rate * found.operations / peak:6.0%} {found.memory / 2**30:11.1f}",
            flush=True,
        )
        curves.setdefault(name, []).append((value, 1000 * found.step))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    draw(curves, picture)


def read(table: str) -> Curves:
    curves: Curves = {}
    for name, value, ms in re.findall(r"^([^\d\n]+?) +(\d+) +(\d+\.\d)", table, re.MULTILINE):
        curves.setdefault(name, []).append((int(value), float(ms)))
    return curves


def draw(curves: Curves, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, len(curves), figsize=(4 * len(curves), 3.2), sharey=True, squeeze=False)
    for axis, (name, points) in zip(axes[0], curves.items(), strict=True):
        values, steps = [value for value, _ in points], [ms for _, ms in points]
        axis.loglog(values, steps, "o-", color="tab:blue")
        power = 2 if name == "pixels a side" else 1
        axis.loglog(values, [steps[-1] * (value / values[-1]) ** power for value in values], "--", color="grey")
        axis.set_xlabel(name)
        axis.set_xticks(values, labels=[f"{value:,}" for value in values])
        axis.yaxis.set_major_locator(ticker.LogLocator(10, subs=(1, 2, 5), numticks=20))
        axis.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        for one in (axis.xaxis, axis.yaxis):
            one.set_minor_locator(ticker.NullLocator())
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("ms a step (dashed: in proportion)")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
