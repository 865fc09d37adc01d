"""Our nets with the weights of the official implementations, by name: module of ours -> its name there."""

from collections.abc import Iterator

import numpy as np
import torch
from formula import near, numbers, weight
from torch import Tensor, nn

from ict.nets.adm import ADM
from ict.nets.embeddings import FourierEmbedding
from ict.nets.layers import Attention, ResidualBlock, Stage
from ict.nets.ncsnpp import NCSNpp


def fill(parameter: Tensor, values: np.ndarray) -> None:
    """Set a weight; matrices and filters of the JAX code have their inputs before their outputs."""
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(values)).reshape(parameter.shape))


# --- NCSN++ of openai/consistency_models_cifar10 (flax): modules are numbered by class in the order of their calls


def ncsnpp_calls(net: NCSNpp) -> Iterator[nn.Module]:
    """Blocks and attentions in the order in which a forward pass calls them."""
    for level, stages in enumerate(net.down):
        for stage in stages:
            yield from (m for m in (stage.block, stage.attention) if m is not None)
        if level < len(net.shrink):
            yield net.shrink[level]
    for stage in net.middle:
        yield from (m for m in (stage.block, stage.attention) if m is not None)
    for level, blocks in enumerate(net.up):
        yield from blocks
        if isinstance(net.attend[level], Attention):
            yield net.attend[level]
        if level < len(net.grow):
            yield net.grow[level]


def load_ncsnpp(net: NCSNpp, *, scale: float) -> None:
    """Fill a net with the formula's weights under their official names and shapes (HWIO)."""

    def conv(module: nn.Conv2d, name: str, key: str = "kernel") -> None:
        out, inputs, height, width = module.weight.shape
        values = weight(f"{name}/{key}", (height, width, inputs, out), fan_in=height * width * inputs)
        fill(module.weight, values.transpose(3, 2, 0, 1))
        fill(module.bias, near(f"{name}/bias", (out,), 0.0))

    def dense(module: nn.Linear, name: str) -> None:
        out, inputs = module.weight.shape
        fill(module.weight, weight(f"{name}/kernel", (inputs, out), fan_in=inputs).T)
        fill(module.bias, near(f"{name}/bias", (out,), 0.0))

    def norm(module: nn.GroupNorm, name: str) -> None:
        fill(module.weight, near(f"{name}/scale", tuple(module.weight.shape), 1.0))
        fill(module.bias, near(f"{name}/bias", tuple(module.bias.shape), 0.0))

    def nin(name: str, channels: int) -> tuple[np.ndarray, np.ndarray]:
        return weight(f"{name}/W", (channels, channels), fan_in=channels).T, near(f"{name}/b", (channels,), 0.0)

    if isinstance(net.embed.noise, FourierEmbedding):
        frequencies = net.embed.noise.frequencies
        fill(frequencies, numbers("GaussianFourierProjection_0/W", tuple(frequencies.shape)) * np.float32(scale))
    dense(net.embed.dense1, "Dense_0")
    dense(net.embed.dense2, "Dense_1")
    conv(net.conv_in, "Conv_0")
    norm(net.norm_out, "GroupNorm_0")
    conv(net.conv_out, "Conv_1")
    for i, step in enumerate(net.pyramid):
        conv(step.conv, f"Downsample_{i}/Conv2d_0", "weight")
    calls = list(ncsnpp_calls(net))
    for i, block in enumerate(m for m in calls if isinstance(m, ResidualBlock)):
        name = f"ResnetBlockBigGANpp_{i}"
        norm(block.norm1, f"{name}/GroupNorm_0")
        conv(block.conv1, f"{name}/Conv_0")
        dense(block.embed, f"{name}/Dense_0")
        norm(block.norm2, f"{name}/GroupNorm_1")
        conv(block.conv2, f"{name}/Conv_1")
        if isinstance(block.skip, nn.Conv2d):
            conv(block.skip, f"{name}/Conv_2")
    for i, attention in enumerate(m for m in calls if isinstance(m, Attention)):
        name, channels = f"AttnBlockpp_{i}", attention.norm.num_channels
        norm(attention.norm, f"{name}/GroupNorm_0")
        parts = [nin(f"{name}/NIN_{k}", channels) for k in range(4)]
        fill(attention.qkv.weight, np.concatenate([w for w, _ in parts[:3]]))
        fill(attention.qkv.bias, np.concatenate([b for _, b in parts[:3]]))
        fill(attention.out.weight, parts[3][0])
        fill(attention.out.bias, parts[3][1])


# --- ADM of openai/consistency_models (torch)


def adm_modules(net: ADM) -> Iterator[tuple[str, nn.Module]]:
    """(official name, module of ours) of every layer with weights."""

    def block(name: str, ours: ResidualBlock) -> Iterator[tuple[str, nn.Module]]:
        yield f"{name}.in_layers.0", ours.norm1
        yield f"{name}.in_layers.2", ours.conv1
        yield f"{name}.emb_layers.1", ours.embed
        yield f"{name}.out_layers.0", ours.norm2
        yield f"{name}.out_layers.3", ours.conv2
        if isinstance(ours.skip, nn.Conv2d):
            yield f"{name}.skip_connection", ours.skip

    def attention(name: str, ours: Attention) -> Iterator[tuple[str, nn.Module]]:
        yield from ((f"{name}.norm", ours.norm), (f"{name}.qkv", ours.qkv), (f"{name}.proj_out", ours.out))

    def stage(name: str, ours: Stage | ResidualBlock) -> Iterator[tuple[str, nn.Module]]:
        yield from block(f"{name}.0", ours.block if isinstance(ours, Stage) else ours)
        if isinstance(ours, Stage) and ours.attention is not None:
            yield from attention(f"{name}.1", ours.attention)

    yield from (("time_embed.0", net.embed.dense1), ("time_embed.2", net.embed.dense2))
    if net.embed.label is not None:
        yield "label_emb", net.embed.label
    yield from (("input_blocks.0.0", net.conv_in), ("out.0", net.norm_out), ("out.2", net.conv_out))
    for i, layer in enumerate(net.down, 1):
        yield from stage(f"input_blocks.{i}", layer)
    first, second = net.middle
    yield from block("middle_block.0", first.block)
    yield from attention("middle_block.1", first.attention)
    yield from block("middle_block.2", second.block)
    number = -1
    for layer in net.up:
        if isinstance(layer, Stage):
            number += 1
            inner = 2 if layer.attention is not None else 1
            yield from stage(f"output_blocks.{number}", layer)
        else:  # the doubling block stands behind the last stage of its level
            yield from block(f"output_blocks.{number}.{inner}", layer)


def load_adm(net: ADM) -> None:
    """Fill a net with the formula's weights under their official names."""
    for name, module in adm_modules(net):
        shape = tuple(module.weight.shape)
        if isinstance(module, nn.Embedding):
            fill(module.weight, numbers(f"{name}.weight", shape))
            continue
        values = weight(f"{name}.weight", shape, fan_in=int(np.prod(shape[1:]))) if len(shape) > 1 else None
        fill(module.weight, near(f"{name}.weight", shape, 1.0) if values is None else values)
        fill(module.bias, near(f"{name}.bias", tuple(module.bias.shape), 0.0))
