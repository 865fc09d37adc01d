"""One training step of each of the paper's recipes on a GPU: images/s and memory.

    PYTHONPATH=src python benchmarks/step.py [recipe:batch ...]

Float32 weights, eager, random images. The batch is one GPU's share of the paper's, unless given: 1,024 over 8 GPUs for
CIFAR-10, 4,096 over 64 for ImageNet.
"""

import sys
import time
from dataclasses import replace

import torch

from ict.cost import measure
from ict.data import Images
from ict.model import ModelSpec, build_model
from ict.recipes import find_recipe, load_recipe
from ict.training.budget import Budget
from ict.training.loop import new_state, train
from ict.training.speed import set_up

SHARES = ("cifar10-ict:128", "cifar10-ict-deep:128", "imagenet64-ict:64", "imagenet64-ict-deep:64")


def step_time(name: str, batch: int, *, warm: int = 3, timed: int = 8) -> tuple[float, float, float]:
    """Seconds a step, GiB at the peak, and the loss of the last step, at N = 1281."""
    config = load_recipe(find_recipe(name))
    config = replace(config, training=replace(config.training, batch=batch, accumulate=1, steps=1000))
    config = replace(config, objective=replace(config.objective, curriculum="constant"))
    count, shape = 4 * batch, (config.data.channels, config.data.image_size, config.data.image_size)
    images = Images(
        pixels=torch.randint(0, 256, (count, *shape), dtype=torch.uint8),
        labels=torch.randint(0, max(1, config.data.classes), (count,)),
        class_names=tuple(map(str, range(max(1, config.data.classes)))),
    )
    torch.cuda.reset_peak_memory_stats()
    model = build_model(ModelSpec.from_config(config, images.class_names))
    set_up(config, model, torch.device("cuda"))
    steps = train(config, new_state(config, model), images, Budget(steps=1000))
    for _ in range(warm):
        next(steps)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(timed):
        state = next(steps)
    loss = state.loss.item()  # waits for the GPU
    return (time.perf_counter() - begun) / timed, torch.cuda.max_memory_allocated() / 2**30, loss


def main() -> None:
    torch.manual_seed(0)
    tf32 = torch.backends.cudnn.allow_tf32
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float32 weights, tf32 in convolutions: {tf32}")
    print("recipe               batch  images/s  TFLOP/s  memory GiB  loss")
    for share in sys.argv[1:] or SHARES:
        name, _, batch = share.partition(":")
        config = load_recipe(find_recipe(name))
        cost = measure(ModelSpec.from_config(config, tuple(map(str, range(config.data.classes)))))
        seconds, memory, loss = step_time(name, int(batch))
        speed = int(batch) / seconds
        print(f"{name:20} {batch:>5} {speed:9.1f} {speed * cost.training / 1e12:8.1f} {memory:11.1f}  {loss:.4g}")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
