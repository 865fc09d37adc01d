"""Other people's code on the same GPU, beside ours: what the comparisons in docs/results.md were made with.

    PYTHONPATH=src python benchmarks/peers.py ect-step ECT [BATCH ...]
    PYTHONPATH=src python benchmarks/peers.py ect-train ECT CIFAR10 INCEPTION OUT SECONDS
    PYTHONPATH=src python benchmarks/peers.py sampling WHO [BATCH ...]

ECT is a checkout of github.com/locuslab/ect, branch amp (it imports `requests`). Its net, loss, optimiser and average
are run as they are, in fp16. Left out: its loader and its logs, which would only slow it down, and that it sets
gradients that are not finite to 0 before its loss scaler could see them.

ect-step    times its training step on the NCSN++ of the paper.
ect-train   gives it SECONDS from the start of the process, from random weights, where its own scripts tune a diffusion
            model: its DDPM++, batch 128, RAdam at 1e-4, dropout 0.2, no mirrored images, an average of 0.9993 (as its
            script for a run of one hour says) and the eight stages of its schedule in equal parts (as its script for a
            long run). Then draws 50,000 samples in one step and in two, judges them, and keeps the first 100 of each as
            OUT/ect-*.png.
sampling    times one-step samples of an ADM for 64x64 pixels. WHO is ours or diffusers (its ConsistencyModelPipeline),
            with +search for cuDNN's search, and diffusers+float32 for what it does unless told otherwise.
"""

import time

BEGUN = time.perf_counter()

import copy  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from ict.bench import machine, timed  # noqa: E402
from ict.device import pick_device  # noqa: E402
from ict.pictures import grid, png  # noqa: E402

DDPMPP = {
    "model_type": "SongUNet", "embedding_type": "positional", "encoder_type": "standard", "decoder_type": "standard",
    "channel_mult_noise": 1, "resample_filter": [1, 1], "model_channels": 128, "channel_mult": [2, 2, 2],
}  # fmt: skip
NCSNPP = DDPMPP | {
    "embedding_type": "fourier", "encoder_type": "residual", "channel_mult_noise": 2, "resample_filter": [1, 3, 3, 1],
}  # fmt: skip
STAGES, SAMPLES, AT_ONCE = 8, 50_000, 500
DEVICE = pick_device("auto")


class ECT:
    """A net of theirs in training."""

    def __init__(self, net: dict[str, Any], *, dropout: float, decay: float, scaled: bool):
        from training.loss import ECMLoss  # type: ignore
        from training.networks import ECMPrecond  # type: ignore

        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        shape = {"img_resolution": 32, "img_channels": 3, "label_dim": 0}
        self.net = ECMPrecond(**shape, **net, use_fp16=True, dropout=dropout).train().requires_grad_(True).to(DEVICE)
        self.ema, self.decay = copy.deepcopy(self.net).eval().requires_grad_(False), decay
        self.optimiser = torch.optim.RAdam(self.net.parameters(), lr=1e-4, betas=(0.9, 0.999), eps=1e-8)
        self.loss, self.scaler = ECMLoss(q=2), torch.amp.GradScaler(DEVICE.type, enabled=scaled)

    def step(self, pixels: Tensor) -> Tensor:
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.loss(self.net, pixels.float() / 127.5 - 1).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimiser)
        self.scaler.update()
        for mine, its in zip(self.ema.parameters(), self.net.parameters(), strict=True):
            mine.copy_(its.detach().lerp(mine, self.decay))
        return loss

    @torch.no_grad()
    def samples(self, count: int, levels: list[float]) -> Iterator[Tensor]:
        """uint8 batches, by their sampler: one network call for each level."""
        torch.manual_seed(0)
        for _ in range(count // AT_ONCE):
            x = torch.zeros(AT_ONCE, 3, 32, 32, dtype=torch.float64, device=DEVICE)
            for sigma in levels:
                x = x + sigma * torch.randn_like(x)
                x = self.ema(x, torch.full((AT_ONCE,), sigma, dtype=torch.float64, device=DEVICE)).double()
            yield (x * 127.5 + 128).clip(0, 255).to(torch.uint8)


def ect_step(*batches: str) -> None:
    for batch in map(int, batches or ("512", "1024")):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        peer = ECT(NCSNPP, dropout=0.3, decay=0.9999, scaled=False)
        peer.loss.update_schedule(STAGES - 1)
        pixels = torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8, device=DEVICE)
        seconds = timed(lambda peer=peer, pixels=pixels: peer.step(pixels), DEVICE, before=8, repeats=12)
        size = sum(parameter.numel() for parameter in peer.net.parameters())
        memory = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"ECT, NCSN++ of {size / 1e6:.1f}M, batch {batch}: {batch / seconds:,.0f} images/s, "
            f"{1000 * seconds:.1f} ms a step, {memory:.1f} GiB",
            flush=True,
        )
        del peer, pixels


def ect_train(cifar10: str, inception: str, out: str, seconds: str) -> None:
    from ict.config import DataConfig
    from ict.data import load_images
    from ict.evaluation.features import open_features
    from ict.evaluation.judge import look, look_at_real, score

    images = load_images(DataConfig(source="cifar10", path=cifar10, image_size=32, channels=3))
    pixels, batch, step, said, spent = images.pixels.to(DEVICE), 128, 0, 0.0, 0.0
    peer = ECT(DDPMPP, dropout=0.2, decay=0.9993, scaled=True)
    while (spent := time.perf_counter() - BEGUN) < float(seconds):
        peer.loss.update_schedule(int(STAGES * spent / float(seconds)))
        loss = peer.step(pixels[torch.randint(len(pixels), (batch,), device=DEVICE)])
        step += 1
        if spent - said > 30:
            said = spent
            print(f"{spent:5.0f} s: step {step:,}, stage {peer.loss.stage}, loss {loss.item():.3f}", flush=True)
    torch.cuda.synchronize()
    spent = time.perf_counter() - BEGUN
    print(f"{spent:.1f} s, {step:,} steps of {batch}, {step * batch / spent:,.0f} images/s", flush=True)
    net = open_features("inception", weights=Path(inception), device=DEVICE)
    Path(out).mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        real = look_at_real(images, net)
        for name, levels in {"one": [80.0], "two": [80.0, 0.821]}.items():
            Path(out, f"ect-{name}.png").write_bytes(png(grid(next(peer.samples(AT_ONCE, levels))[:100], scale=2)))
            found = score(look(peer.samples(SAMPLES, levels), net, count=SAMPLES), real, net)
            print(f"ECT, {name}:", ", ".join(f"{key} {value:.4f}" for key, value in found.items()), flush=True)


def sampling(who: str, *batches: str) -> None:
    name, *how = who.split("+")
    if name not in ("ours", "diffusers") or set(how) - {"search", "float32"}:
        sys.exit(__doc__)
    torch.backends.cudnn.benchmark = "search" in how  # once for a process: what it has chosen for a shape, it keeps
    torch.manual_seed(0)
    draw = our_samples() if name == "ours" else their_samples(torch.float32 if "float32" in how else torch.float16)
    for count in map(int, batches or ("1", "16", "64", "256")):
        seconds = timed(lambda n=count: draw(n), DEVICE, before=3, repeats=5)
        print(f"{who}, batch {count}: {count / seconds:,.1f} images/s, {1000 * seconds:.1f} ms", flush=True)


def our_samples() -> Callable[[int], object]:
    from ict.model import ModelSpec, build_model
    from ict.recipes import find_recipe, load_recipe
    from ict.sampling import Generator

    config = load_recipe(find_recipe("imagenet64-ict"), ["net.scale_shift=true"])
    spec = ModelSpec.from_config(config, tuple(map(str, range(1000))))
    generator = Generator(build_model(spec, seed=0), spec).to(DEVICE)
    print(f"ours: {generator.model.size / 1e6:.1f}M parameters, {generator.model.precision}")
    return lambda count: generator.sample(count, label=0, batch=count)


def their_samples(dtype: torch.dtype) -> Callable[[int], object]:
    import diffusers

    unet = diffusers.UNet2DModel(
        sample_size=64, in_channels=3, out_channels=3, layers_per_block=3, block_out_channels=(192, 384, 576, 768),
        down_block_types=("ResnetDownsampleBlock2D", *["AttnDownBlock2D"] * 3),
        up_block_types=(*["AttnUpBlock2D"] * 3, "ResnetUpsampleBlock2D"), resnet_time_scale_shift="scale_shift",
        num_class_embeds=1000, attention_head_dim=64, norm_num_groups=32, norm_eps=1e-5, attn_norm_num_groups=32,
        downsample_type="resnet", upsample_type="resnet",
    ).eval()  # fmt: skip
    scheduler = diffusers.CMStochasticIterativeScheduler()
    pipe = diffusers.ConsistencyModelPipeline(unet=unet, scheduler=scheduler).to(DEVICE, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    size = sum(parameter.numel() for parameter in unet.parameters())
    print(f"diffusers {diffusers.__version__}: {size / 1e6:.1f}M parameters, {dtype}")
    return lambda count: pipe(batch_size=count, num_inference_steps=1, class_labels=[0] * count, output_type="pt")


def main() -> None:
    what, *rest = sys.argv[1:] or ["nothing"]
    if what in ("ect-step", "ect-train"):
        sys.path.insert(0, rest.pop(0))
    works: dict[str, Callable[..., None]] = {"ect-step": ect_step, "ect-train": ect_train, "sampling": sampling}
    if what not in works:
        sys.exit(__doc__)
    print(machine(DEVICE))
    works[what](*rest)


if __name__ == "__main__":
    main()
