import json
import math

import pytest
import safetensors.torch
import torch
from helpers import SpyNet, gaussian_model, tiny_config
from hypothesis import given
from hypothesis import strategies as st

from ict.config import NoiseConfig
from ict.distance import squared_l2
from ict.files import DamagedFile
from ict.model import ConsistencyModel, ModelSpec, build_model, pack_model, read_model, scalings
from ict.noise import karras_sigmas
from ict.reading import ConfigError


def tiny_model(**net) -> ConsistencyModel:
    model = build_model(ModelSpec.from_config(tiny_config(net=net), tuple("0123456789")))
    for parameter in model.parameters():  # fresh nets end in zeros; make F matter
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_model_is_the_identity_at_sigma_min(dtype):
    x = torch.randn(16, 1, 8, 8) * 3
    sigma = torch.full((16,), 0.002, dtype=dtype)
    assert torch.equal(tiny_model()(x, sigma, torch.zeros(16, dtype=torch.long)), x)
    assert not torch.equal(tiny_model()(x, sigma * 1.01, torch.zeros(16, dtype=torch.long)), x)


@given(st.floats(1e-4, 0.1), st.floats(0.1, 2.0))
def test_the_boundary_holds_for_the_first_level_of_every_grid(sigma_min, sigma_data):
    c = scalings(karras_sigmas(5, sigma_min=sigma_min)[:1], sigma_min=sigma_min, sigma_data=sigma_data)
    assert c.c_skip.item() == 1 and c.c_out.item() == 0


@pytest.mark.parametrize("sigma", [0.002, 0.01, 0.5, 3.0, 80.0])
def test_scalings_are_the_formulas_of_2023(sigma):
    """c_skip and c_out with σ_min, c_in with its square root, c_noise = ¼ ln σ."""
    c = scalings(torch.tensor([sigma], dtype=torch.float64), sigma_min=0.002, sigma_data=0.5)
    assert c.c_skip.item() == pytest.approx(0.25 / ((sigma - 0.002) ** 2 + 0.25), rel=1e-14)
    assert c.c_out.item() == pytest.approx(0.5 * (sigma - 0.002) / math.sqrt(sigma**2 + 0.25), rel=1e-14)
    assert c.c_in.item() == pytest.approx(1 / math.sqrt(sigma**2 + 0.25), rel=1e-14)
    assert c.c_noise.item() == pytest.approx(math.log(sigma) / 4, rel=1e-14)


def test_the_net_sees_scaled_images_and_c_noise_in_float32():
    """Neither the raw image (c_in forgotten) nor the raw σ."""
    net = SpyNet()
    model = ConsistencyModel(net, NoiseConfig(), image_shape=(1, 8, 8))
    x = torch.randn(3, 1, 8, 8)
    model(x, torch.tensor([0.5, 2.0, 80.0], dtype=torch.float64))
    seen = net.calls[0]
    for i, sigma in enumerate((0.5, 2.0, 80.0)):
        assert torch.allclose(seen["x"][i], x[i] / math.sqrt(sigma**2 + 0.25), rtol=1e-6)
        assert seen["c_noise"][i].item() == pytest.approx(math.log(sigma) / 4, rel=1e-6)
    assert seen["x"].dtype == seen["c_noise"].dtype == torch.float32


def test_noisy_data_reaches_the_net_with_unit_variance():
    net = SpyNet()
    model = ConsistencyModel(net, NoiseConfig(sigma_data=0.5), image_shape=(1, 8, 8))
    for sigma in (0.002, 0.7, 80.0):
        x = 0.5 * torch.randn(500, 1, 8, 8) + sigma * torch.randn(500, 1, 8, 8)
        model(x, torch.full((500,), sigma))
        assert net.calls[-1]["x"].std().item() == pytest.approx(1, abs=0.02)


def test_a_half_precision_net_leaves_the_skip_path_exact():
    class HalfNet(SpyNet):
        def forward(self, x, c_noise, label=None, key=None):
            return torch.ones_like(x, dtype=torch.bfloat16)

    model = ConsistencyModel(HalfNet(), NoiseConfig(), image_shape=(1, 8, 8))
    x = torch.full((1, 1, 8, 8), 1 + 2**-20)
    out = model(x, torch.tensor([0.002], dtype=torch.float64))
    assert out.dtype == torch.float32 and torch.equal(out, x)


def test_exact_consistency_function_of_gaussian_data():
    """f is constant along the exact trajectories x(σ) = x₀ √((s² + σ²)/(s² + σ_min²)) of the flow (§2)."""
    noise, s = NoiseConfig(), 0.6
    sigmas = karras_sigmas(41)
    x0 = torch.randn(41, 1, 8, 8, dtype=torch.float64)
    path = x0[:1] * torch.sqrt((s**2 + sigmas**2) / (s**2 + noise.sigma_min**2)).reshape(-1, 1, 1, 1)
    out = gaussian_model(s, noise)(path, sigmas)
    assert squared_l2(out, x0[:1].expand_as(out)).max() < 1e-9


def test_fresh_weights_are_a_function_of_the_seed():
    spec = ModelSpec.from_config(tiny_config(), tuple("0123456789"))
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    a, b, c = build_model(spec, seed=1), build_model(spec, seed=1), build_model(spec, seed=2)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.net.conv_in.weight, c.net.conv_in.weight)
    assert torch.equal(torch.random.get_rng_state(), before)  # nobody else's randomness is touched


# --- the model file


@pytest.fixture
def saved(tmp_path):
    spec = ModelSpec.from_config(tiny_config(), tuple("0123456789"))
    model = tiny_model()
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack_model(spec, model.state_dict(), {"step": 7}))
    return path, model, spec


def test_a_model_file_gives_back_the_model(saved):
    path, model, spec = saved
    again, read_spec, origin = read_model(path)
    assert read_spec == spec and origin == {"step": 7}
    x, sigma, label = torch.randn(2, 1, 8, 8), torch.tensor([1.0, 80.0]), torch.tensor([3, 4])
    assert torch.equal(again(x, sigma, label), model(x, sigma, label))


def test_a_truncated_or_changed_file_is_refused(saved):
    path, *_ = saved
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-99] ^= 1  # a bit of one weight
    other = whole.replace(b'\\"sigma_data\\": 0.5', b'\\"sigma_data\\": 0.4')
    assert other != whole
    for damaged in (whole[:100], whole[:-50], b"not a model", b"", bytes(flipped), other):
        path.write_bytes(damaged)
        with pytest.raises(DamagedFile, match=r"model\.safetensors"):
            read_model(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_may_lie_as_they_like(saved, dtype):
    """Views, of one element too, and whatever layout."""
    path, model, spec = saved
    plain = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    odd = {name: torch.stack((tensor, tensor), dim=-1)[..., 0] for name, tensor in plain.items()}
    assert any(tensor.numel() == 1 and tensor.stride() != (1,) for tensor in odd.values())
    path.write_bytes(pack_model(spec, odd, {}))
    assert path.read_bytes() == pack_model(spec, plain, {})
    again = read_model(path)[0].state_dict()
    assert all(torch.equal(a, b.float()) for a, b in zip(again.values(), plain.values(), strict=True))


def test_a_file_of_an_older_version_has_no_checksum(saved):
    path, model, _ = saved
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["ict"])
    del header["digest"]
    safetensors.torch.save_file(model.state_dict(), path, metadata={"ict": json.dumps(header)})
    assert all(map(torch.equal, read_model(path)[0].parameters(), model.parameters()))


def test_a_foreign_file_is_refused(tmp_path):
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="not a model of this program"):
        read_model(tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="no model at"):
        read_model(tmp_path / "missing.safetensors")


@pytest.mark.parametrize(
    "header",
    [
        "{", "[]", "null", '"x"', "{}",
        '{"format": "ict-model-1"}',
        '{"format": "ict-model-1", "spec": [], "origin": {}}',
        '{"format": "ict-model-1", "spec": {"channels": 1}, "origin": {}}',
        '{"format": "ict-model-1", "spec": {"image_size": 8, "channels": -1}, "origin": {}}',
        '{"format": "ict-model-1", "spec": {"image_size": 8, "channels": 1, "sigma_mid": -1.0}, "origin": {}}',
        '{"format": "ict-model-1", "spec": {"image_size": 8, "channels": 1, "net": {"blocks": 1000000}}, "origin": {}}',
        '{"format": "ict-model-1", "spec": {"image_size": 8, "channels": 1}, "origin": 3}',
        '{"format": "ict-model-9", "spec": {"image_size": 8, "channels": 1}, "origin": {}}',
    ],
)  # fmt: skip
def test_a_header_that_says_nonsense_is_refused(header, tmp_path):
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "m.safetensors", metadata={"ict": header})
    with pytest.raises((ConfigError, DamagedFile), match=r"m\.safetensors"):
        read_model(tmp_path / "m.safetensors")


def test_weights_that_are_not_finite_are_refused(saved):
    path, model, spec = saved
    weights = {name: tensor * float("nan") for name, tensor in model.state_dict().items()}
    path.write_bytes(pack_model(spec, weights, {}))
    with pytest.raises(DamagedFile, match="not finite"):
        read_model(path)


def test_weights_that_do_not_fit_are_refused(saved):
    path, model, _ = saved
    wider = ModelSpec.from_config(tiny_config(net={"channels": 16}), tuple("0123456789"))
    path.write_bytes(pack_model(wider, model.state_dict(), {}))
    with pytest.raises(DamagedFile, match="do not fit"):
        read_model(path)


def test_the_header_is_plain_json(saved):
    path, _, spec = saved
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]["ict"])
    assert header["spec"]["net"]["channels"] == spec.net.channels == 8


def test_the_same_model_is_the_same_bytes(saved):
    path, model, spec = saved
    assert pack_model(spec, model.state_dict(), {"step": 7}) == path.read_bytes()
