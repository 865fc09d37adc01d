"""One training step of each of the paper's recipes on a GPU: images/s and memory.

    PYTHONPATH=src python benchmarks/step.py [recipe:batch ...]

Random images, at the last N, `[speed]` as the recipe has it. The batch is one GPU's share of the paper's, unless given:
1,024 over 8 GPUs for CIFAR-10, 4,096 over 64 for ImageNet. `ict bench` says more of one of them.
"""

import sys

import torch

from ict.bench import bench_steps, machine
from ict.recipes import find_recipe, load_recipe

SHARES = ("cifar10-ict:128", "cifar10-ict-deep:128", "imagenet64-ict:64", "imagenet64-ict-deep:64")


def main() -> None:
    device = torch.device("cuda")
    print(machine(device))
    print("recipe               batch  precision  images/s  TFLOP/s  memory GiB")
    for share in sys.argv[1:] or SHARES:
        name, _, batch = share.partition(":")
        config = load_recipe(find_recipe(name), [f"training.batch={batch}", "training.accumulate=1"])
        found = bench_steps(config, device, steps=8)[0]
        speed = found.batch / found.step
        print(
            f"{name:20} {batch:>5} {found.precision:>10} {speed:9.1f} {speed * found.operations / 1e12:8.1f} "
            f"{found.memory / 2**30:11.1f}",
            flush=True,
        )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
