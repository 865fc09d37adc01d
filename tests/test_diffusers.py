"""diffusers as an oracle: the same ADM as its UNet2DModel, the same scalings and steps as its consistency scheduler."""

import math

import numpy as np
import pytest
import torch
from helpers import gaussian_model
from torch import nn

from ict.config import NetConfig, NoiseConfig
from ict.model import scalings
from ict.nets import build_net
from ict.nets.layers import Attention, ResidualBlock, Stage

diffusers = pytest.importorskip("diffusers")


def copy(ours: nn.Module, theirs: nn.Module) -> None:
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.reshape(theirs.weight.shape))
        if getattr(ours, "bias", None) is not None:
            theirs.bias.copy_(ours.bias)


def copy_block(ours: ResidualBlock, theirs: nn.Module) -> None:
    for name, other in (("norm1", "norm1"), ("conv1", "conv1"), ("embed", "time_emb_proj"), ("norm2", "norm2")):
        copy(getattr(ours, name), getattr(theirs, other))
    copy(ours.conv2, theirs.conv2)
    if isinstance(ours.skip, nn.Conv2d):
        copy(ours.skip, theirs.conv_shortcut)


def copy_attention(ours: Attention, theirs: nn.Module) -> None:
    copy(ours.norm, theirs.group_norm)
    copy(ours.out, theirs.to_out[0])
    for part, weight, bias in zip(
        (theirs.to_q, theirs.to_k, theirs.to_v), ours.qkv.weight.chunk(3), ours.qkv.bias.chunk(3), strict=True
    ):
        with torch.no_grad():
            part.weight.copy_(weight[:, :, 0, 0])
            part.bias.copy_(bias)


def copy_level(stages: list[Stage], resampler: ResidualBlock | None, theirs: nn.Module, sampler: str) -> None:
    for i, stage in enumerate(stages):
        copy_block(stage.block, theirs.resnets[i])
        if stage.attention is not None:
            copy_attention(stage.attention, theirs.attentions[i])
    if resampler is not None:
        copy_block(resampler, getattr(theirs, sampler)[0])


def levels(layers: nn.ModuleList) -> list[tuple[list[Stage], ResidualBlock | None]]:
    """Our flat list of layers as levels of diffusers: stages, then the block that leads to the next level."""
    found: list[tuple[list[Stage], ResidualBlock | None]] = [([], None)]
    for layer in layers:
        if isinstance(layer, Stage):
            found[-1][0].append(layer)
        else:
            found[-1] = (found[-1][0], layer)
            found.append(([], None))
    return found


@pytest.mark.parametrize("scale_shift", [False, True])
@pytest.mark.parametrize("blocks", [1, 2])
def test_adm_is_their_unet(scale_shift, blocks):
    config = NetConfig(
        kind="adm", channels=32, multipliers=(1, 2), blocks=blocks, attention=(8,), head_channels=16,
        embedding="positional", scale_shift=scale_shift,
    )  # fmt: skip
    ours = build_net(config, image_size=16, channels=3, classes=10).eval()
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.1)
    theirs = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=blocks, block_out_channels=(32, 64),
        down_block_types=("ResnetDownsampleBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "ResnetUpsampleBlock2D"),
        resnet_time_scale_shift="scale_shift" if scale_shift else "default", num_class_embeds=10,
        attention_head_dim=16, norm_num_groups=32, norm_eps=1e-5, attn_norm_num_groups=32,
        downsample_type="resnet", upsample_type="resnet",
    ).eval()  # fmt: skip
    copy(ours.embed.dense1, theirs.time_embedding.linear_1)
    copy(ours.embed.dense2, theirs.time_embedding.linear_2)
    copy(ours.embed.label, theirs.class_embedding)
    copy(ours.conv_in, theirs.conv_in)
    copy(ours.norm_out, theirs.conv_norm_out)
    copy(ours.conv_out, theirs.conv_out)
    for (stages, resampler), level in zip(levels(ours.down), theirs.down_blocks, strict=True):
        copy_level(stages, resampler, level, "downsamplers")
    for (stages, resampler), level in zip(levels(ours.up), theirs.up_blocks, strict=True):
        copy_level(stages, resampler, level, "upsamplers")
    for stage, block in zip(ours.middle, theirs.mid_block.resnets, strict=True):
        copy_block(stage.block, block)
    copy_attention(ours.middle[0].attention, theirs.mid_block.attentions[0])

    x, c_noise, label = torch.randn(3, 3, 16, 16), torch.tensor([-1.5, 0.1, 1.0]), torch.tensor([0, 4, 9])
    with torch.no_grad():
        a, b = ours(x, c_noise, label), theirs(x, 1000 * c_noise, class_labels=label).sample
    assert (a - b).norm() / b.norm() < 1e-5 and b.std() > 0.01


@pytest.mark.parametrize("sigma", [0.002, 0.01, 0.5, 3.0, 80.0])
def test_scalings_are_their_schedulers(sigma):
    scheduler = diffusers.CMStochasticIterativeScheduler()
    c_skip, c_out = scheduler.get_scalings_for_boundary_condition(sigma)
    ours = scalings(torch.tensor([sigma], dtype=torch.float64), sigma_min=0.002, sigma_data=0.5)
    assert ours.c_skip.item() == pytest.approx(c_skip, rel=1e-12)
    assert ours.c_out.item() == pytest.approx(c_out, rel=1e-12, abs=1e-15)
    c_noise = scheduler.sigma_to_t(np.array([sigma]))[0]  # 1000 · ¼ ln(σ + 1e-44)
    assert 1000 * ours.c_noise.item() == pytest.approx(c_noise, rel=1e-9)


def test_a_second_step_is_their_schedulers():
    """Their step from σ_max to the next level: f, clipped, plus √(σ² − σ_min²) of fresh noise."""
    scheduler = diffusers.CMStochasticIterativeScheduler(num_train_timesteps=40)
    scheduler.set_timesteps(timesteps=[39, 20])
    high, low = (scheduler.sigmas[i].item() for i in (0, 1))
    model = gaussian_model(0.5, NoiseConfig())
    noisy = high * torch.randn(4, 1, 8, 8)
    c_in = 1 / math.sqrt(high**2 + 0.25)
    inputs = scheduler.scale_model_input(noisy, scheduler.timesteps[0])
    assert torch.allclose(inputs, noisy * c_in, rtol=1e-4)
    answer = model.net(inputs.double(), torch.full((4,), math.log(high) / 4)).float()
    theirs = scheduler.step(
        answer, scheduler.timesteps[0], noisy, generator=torch.Generator().manual_seed(0)
    ).prev_sample
    z = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    ours = model(noisy.double(), torch.full((4,), high, dtype=torch.float64)).clamp(-1, 1)
    assert torch.allclose(theirs.double(), ours + math.sqrt(low**2 - 0.002**2) * z, atol=1e-4)
