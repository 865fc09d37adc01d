import math

import pytest
import torch
from torch import nn

from ict import rng
from ict.config import NetConfig
from ict.nets import NETS, build_net
from ict.nets.dropout import Dropout, dropout_mask
from ict.nets.embeddings import FourierEmbedding, PositionalEmbedding, sensitivity
from ict.nets.layers import Attention, Fir, ResidualBlock, Style, group_norm
from ict.noise import karras_sigmas
from ict.reading import ConfigError

IMAGE_NETS = sorted(NETS.keys() - {"mlp"})  # that one is for points: tests/test_mixture.py


def net(*, size: int = 8, channels: int = 1, classes: int = 0, **config) -> nn.Module:
    torch.manual_seed(0)
    config = {"channels": 8, "multipliers": (1, 2), "blocks": 1, **config}
    built = build_net(NetConfig(**config), image_size=size, channels=channels, classes=classes)
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.2)
    return built


def keys(n: int, *, step: int = 0) -> torch.Tensor:
    return rng.words(torch.arange(n), 1, seed=0, step=step, stream=rng.Stream.DROPOUT)[:, 0]


@pytest.mark.parametrize("kind", IMAGE_NETS)
@pytest.mark.parametrize("size", [8, 16, 28, 32, 64])
@pytest.mark.parametrize("embedding", ["fourier", "sinusoidal", "positional"])
def test_shapes(kind, size, embedding):
    out = net(kind=kind, size=size, channels=3, embedding=embedding, multipliers=(1, 2, 2), attention=(size // 2,))(
        torch.randn(2, 3, size, size), torch.zeros(2)
    )
    assert out.shape == (2, 3, size, size)


@pytest.mark.parametrize("kind", IMAGE_NETS)
def test_a_fresh_net_answers_next_to_nothing(kind):
    """Zero, or 1e-10 in variance where NCSN++ writes that; the inner weights are not zero."""
    fresh = build_net(NetConfig(kind=kind, channels=8), image_size=8, channels=1, classes=0)
    assert fresh(torch.randn(2, 1, 8, 8), torch.zeros(2)).abs().max() < 1e-3
    assert all(m.weight.std() > 1e-3 for n, m in fresh.named_modules() if n.endswith("conv1"))


@pytest.mark.parametrize("kind", IMAGE_NETS)
@pytest.mark.parametrize("classes", [0, 10])
def test_gradients_reach_every_parameter(kind, classes):
    built = net(kind=kind, classes=classes, attention=(4, 8), dropout=0.1, blocks=2)
    label = torch.arange(10) if classes else None
    built(torch.randn(10, 1, 8, 8), torch.randn(10), label, keys(10)).square().mean().backward()
    silent = [n for n, p in built.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
    assert silent == []


def test_labels_matter_and_are_required():
    built = net(classes=10)
    x, noise = torch.randn(1, 1, 8, 8).expand(2, 1, 8, 8), torch.zeros(2)
    out = built(x, noise, torch.tensor([0, 1]))
    assert not torch.allclose(out[0], out[1])
    with pytest.raises(ValueError, match="class labels"):
        built(x, noise)


def test_attention_stands_where_asked():
    def count(**config):
        return sum(isinstance(m, Attention) for m in net(**config).modules())

    assert count() == 0
    assert count(attention=(8,)) == 1 + 1 + 2  # down, middle, up
    assert count(attention=(4, 8)) == 2 + 1 + 4
    assert count(kind="adm") == 1  # the middle always
    assert count(kind="ncsnpp", attention=(8,)) == 1 + 1 + 1  # once on the way up


def test_dropout_can_be_for_small_feature_maps_alone():
    """Appendix B: 0.2 where the map is at most 16×16. A resampling block counts by the map it drops."""
    built = net(kind="adm", size=32, channels=3, multipliers=(1, 1, 1), dropout=0.2, dropout_max_size=16)
    x, dropped = torch.randn(1, 3, 32, 32), {}
    for layer in built.modules():
        if isinstance(layer, Dropout):
            layer.register_forward_hook(lambda m, i, out: dropped.setdefault(i[0].shape[-1], set()).add(m.p))
    built(x, torch.zeros(1), None, keys(1))
    assert dropped == {32: {0.0}, 16: {0.2}, 8: {0.2}}


@pytest.mark.parametrize("kind", IMAGE_NETS)
def test_memory_layout_does_not_matter(kind):
    built = net(kind=kind, channels=3, size=16, multipliers=(1, 2), attention=(8,), dropout=0.2)
    x, noise = torch.randn(2, 3, 16, 16), torch.zeros(2)
    plain = built(x, noise, None, keys(2))
    built = built.to(memory_format=torch.channels_last)
    last = built(x.to(memory_format=torch.channels_last), noise, None, keys(2))
    assert torch.allclose(plain, last, atol=1e-4 * plain.abs().max().item())


def test_ncsnpp_starts_as_the_official_net_does():
    """Uniform weights of variance scale / mean fan (0.1 for queries, keys and values, 1e-10 at the end of a branch)."""
    torch.manual_seed(0)
    config = NetConfig(kind="ncsnpp", channels=64, multipliers=(1, 2), blocks=1, attention=(8,), head_channels=0)
    fresh = build_net(config, image_size=16, channels=3, classes=0)

    def check(module, fan_in, fan_out, scale=1.0):
        assert module.weight.std().item() == pytest.approx(math.sqrt(scale * 2 / (fan_in + fan_out)), rel=0.06)
        assert module.weight.abs().max() <= math.sqrt(6 * scale / (fan_in + fan_out)) * (1 + 1e-6)
        assert module.bias.abs().max() == 0

    block = fresh.down[1][0].block  # 64 -> 128 channels
    check(block.conv1, 64 * 9, 128 * 9)
    check(block.skip, 64, 128)
    check(block.embed, 256, 128)
    check(fresh.embed.dense1, 128, 256)
    check(fresh.pyramid[0].conv, 3 * 9, 64 * 9)
    check(fresh.middle[0].attention.qkv, 128, 128, scale=0.1)
    assert 0 < block.conv2.weight.abs().max() < 1e-5 and 0 < fresh.conv_out.weight.abs().max() < 1e-5


@pytest.mark.parametrize("kind", IMAGE_NETS)
def test_dropout_stands_between_the_second_silu_and_the_second_convolution(kind):
    built = net(kind=kind, dropout=0.3, channels=3)
    block = next(m for m in built.modules() if isinstance(m, ResidualBlock))
    seen = {}
    block.norm2.register_forward_hook(
        lambda _m, _i, options, out: seen.update(norm=out, silu=options["silu"]), with_kwargs=True
    )
    block.dropout.register_forward_hook(lambda _m, i, out: seen.update(dropout=(i[0], out)))
    block.conv2.register_forward_hook(lambda _m, i, _out: seen.update(conv=i[0]))
    built(torch.randn(2, 3, 8, 8), torch.zeros(2), None, keys(2))
    assert seen["silu"] and torch.equal(seen["dropout"][1], seen["norm"]) and seen["dropout"][0].min() > -0.279
    assert torch.equal(seen["conv"], seen["dropout"][1])


# --- resampling


def test_the_filter_keeps_a_constant_image_inside():
    x = torch.ones(1, 2, 8, 8)
    assert torch.allclose(Fir(down=2)(x)[:, :, 1:-1, 1:-1], torch.ones(1, 2, 2, 2))
    assert torch.allclose(Fir(up=2)(x)[:, :, 1:-1, 1:-1], torch.ones(1, 2, 14, 14))
    assert Fir(padding=2)(x).shape == (1, 2, 9, 9)


def test_the_filter_against_zeros_put_in_by_hand():
    """Doubling: zeros between the pixels, padding (2, 1), gain 4. Halving: padding (1, 1), every second pixel."""
    x = torch.randn(1, 1, 5, 6)
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
    kernel = torch.outer(taps, taps)[None, None]
    spread = torch.zeros(1, 1, 10, 12)
    spread[:, :, ::2, ::2] = x
    doubled = nn.functional.conv2d(nn.functional.pad(spread, (2, 1, 2, 1)), 4 * kernel)
    assert torch.allclose(Fir(up=2)(x), doubled, atol=1e-6)
    halved = nn.functional.conv2d(nn.functional.pad(x, (1, 1, 1, 1)), kernel)[:, :, ::2, ::2]
    assert torch.allclose(Fir(down=2)(x), halved, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        ({"multipliers": (1, 2, 2, 2)}, 20, "cannot be halved 3 times"),
        ({"multipliers": (1, 1, 1, 1), "kind": "adm"}, 8, "leaves 2 pixels"),
        ({"attention": (16,)}, 8, "feature maps of 16"),
        ({"attention": (8,), "multipliers": (5,), "head_channels": 16}, 8, "net.head_channels = 16 does not divide"),
        ({"kind": "ncsnpp", "scale_shift": True}, 8, "for net.kind = adm alone"),
        ({"kind": "unett"}, 8, "did you mean 'unet'"),
        ({"embedding": "furier"}, 8, "did you mean 'fourier'"),
    ],
)
def test_what_cannot_be_built_is_refused(config, size, message):
    with pytest.raises(ConfigError, match=message):
        net(size=size, **config)


# --- embeddings


def test_fourier_embedding_is_the_published_one():
    embedding = FourierEmbedding(256, scale=0.02)
    assert embedding.frequencies.shape == (128,)
    assert embedding.frequencies.std().item() == pytest.approx(0.02, rel=0.25)
    assert "frequencies" in embedding.state_dict() and not list(embedding.parameters())  # frozen, but kept
    out = embedding(torch.tensor([0.3]))[0]
    angle = 2 * math.pi * 0.3 * embedding.frequencies
    assert torch.allclose(out, torch.cat((angle.sin(), angle.cos())))


def test_the_default_embedding_is_not_oversensitive():
    """Fourier scale 16 (2023) tells neighbouring levels apart a hundred times too well (§3.1, Fig. 1a)."""
    torch.manual_seed(0)
    assert NetConfig().fourier_scale == 0.02
    assert net().embed.noise.frequencies.abs().max() < 0.1
    sigmas = karras_sigmas(50)
    calm, wild = (sensitivity(FourierEmbedding(256, scale=scale), sigmas).max().item() for scale in (0.02, 16.0))
    assert wild > 500 * calm


def test_sensitivity_is_the_slope():
    embedding, sigma = FourierEmbedding(64, scale=1.0), torch.tensor([0.01, 1.0, 50.0])
    ahead, behind = (embedding(0.25 * (sigma.log() + step)) for step in (5e-3, -5e-3))
    assert torch.allclose(sensitivity(embedding, sigma), (ahead - behind).norm(dim=1) / 1e-2, rtol=1e-2)
    # in closed form: ¼ · 2π · ‖w‖, the same at every level
    assert torch.allclose(
        sensitivity(embedding, sigma), math.pi / 2 * embedding.frequencies.norm().expand(3), rtol=1e-4
    )


def test_a_fourier_scale_of_two_hundredths_is_closest_to_positional():
    """§3.1, Fig. 1a: true of the positional embedding of ¼ ln σ.

    With the factor of 1000 that the published ImageNet code puts before it, it is more sensitive than Fourier 16.
    """
    torch.manual_seed(0)
    sigma = torch.tensor([1.0])
    fourier = {
        scale: sensitivity(FourierEmbedding(256, scale=scale), sigma).item() for scale in (16.0, 4.0, 1.0, 0.2, 0.02)
    }
    plain, thousandfold = (sensitivity(PositionalEmbedding(256, scale=scale), sigma).item() for scale in (1.0, 1000.0))
    assert min(fourier, key=lambda scale: abs(math.log(fourier[scale] / plain))) == 0.02
    assert thousandfold > fourier[16.0]


def test_positional_embedding_scales_by_a_thousand():
    embedding = PositionalEmbedding(8)
    out = embedding(torch.tensor([0.25 * math.log(80)]))[0]
    angle = 250 * math.log(80) * torch.tensor([1.0, 0.1, 0.01, 0.001])
    assert torch.allclose(out, torch.cat((angle.cos(), angle.sin())), atol=1e-3)


# --- dropout


def test_the_same_keys_give_the_same_mask_and_other_keys_another():
    built = net(dropout=0.3, blocks=2).train()
    x, noise = torch.randn(4, 1, 8, 8), torch.zeros(4)
    first = built(x, noise, None, keys(4))
    torch.manual_seed(99)  # the global generator has no say
    assert torch.equal(built(x, noise, None, keys(4)), first)
    assert not torch.equal(built(x, noise, None, keys(4, step=1)), first)
    assert torch.equal(built(x[2:], noise[2:], None, keys(4)[2:]), first[2:]) or torch.allclose(
        built(x[2:], noise[2:], None, keys(4)[2:]), first[2:], atol=1e-5
    )


def test_masks_are_kept_at_the_asked_rate_and_independent():
    shape = torch.Size((64, 8, 16, 16))
    mask = dropout_mask(shape, keys(64), p=0.3, salt=0).double()
    assert mask.mean().item() == pytest.approx(0.7, abs=0.004)  # 3 standard errors
    assert mask.flatten(1).mean(dim=1).std().item() == pytest.approx(math.sqrt(0.21 / 2048), rel=0.4)
    others = {
        "another layer": dropout_mask(shape, keys(64), p=0.3, salt=1).double(),
        "another step": dropout_mask(shape, keys(64, step=1), p=0.3, salt=0).double(),
        "another sample": mask.roll(1, 0),
        "the next pixel": mask.roll(1, -1),
        "the next channel": mask.roll(1, 1),
    }
    for name, other in others.items():
        assert abs(torch.corrcoef(torch.stack((mask.flatten(), other.flatten())))[0, 1]) < 0.008, name


def test_samples_with_neighbouring_keys_do_not_share_a_mask_in_another_order():
    mask = dropout_mask(torch.Size((2, 4096)), torch.tensor([4, 5]), p=0.5, salt=0)
    assert not torch.equal(mask[0].reshape(-1, 2).flip(1).flatten(), mask[1])
    assert 1800 < (mask[0] == mask[1]).sum() < 2300


def test_dropout_keeps_the_mean_and_rests_in_evaluation():
    layer = Dropout(0.4)
    x = torch.ones(64, 8, 8, 8)
    assert layer(x, keys(64)).mean().item() == pytest.approx(1, abs=0.02)
    assert torch.equal(layer.eval()(x, None), x)
    with pytest.raises(ValueError, match="key"):
        layer.train()(x, None)


@pytest.mark.parametrize("kind", IMAGE_NETS)
def test_no_net_uses_dropout_that_depends_on_history(kind):
    built = net(kind=kind, dropout=0.3)
    assert not [m for m in built.modules() if isinstance(m, nn.Dropout | nn.Dropout2d | nn.AlphaDropout)]
    salts = [m.salt for m in built.modules() if isinstance(m, Dropout)]
    assert len(set(salts)) == len(salts) > 1


def test_compiled_student_and_teacher_share_the_mask_with_eager():
    """One graph with gradients and one without, both equal to eager: the mask is part of neither's history."""
    built = ResidualBlock(8, 8, 4, dropout=0.3, style=Style(norm=group_norm))
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.2)
    compiled = torch.compile(built, fullgraph=True)
    x, embedding = torch.randn(4, 8, 8, 8), torch.randn(4, 4)
    eager = built(x, embedding, keys(4))
    student = compiled(x, embedding, keys(4))
    with torch.no_grad():
        teacher = compiled(x, embedding, keys(4))
    assert torch.allclose(student, eager, atol=1e-5)
    assert torch.allclose(teacher, eager, atol=1e-5)
    assert not torch.allclose(compiled(x, embedding, keys(4, step=1)), eager, atol=1e-2)
