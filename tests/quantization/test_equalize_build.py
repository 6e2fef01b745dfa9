"""The whole job with every method of the recipe at once, on an encoder and on a convolutional network."""

from __future__ import annotations

from importlib.util import find_spec

import encoder
import numpy as np
import pytest
from support import save_onnx

import trtforge

pytestmark = pytest.mark.skipif(find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed")

FULL = "{smooth: auto, shift: true, rounding: learned, bias_correction: true, weight_range: mse}"
PLAIN = "{smooth: none, shift: false, rounding: nearest, bias_correction: false, weight_range: minmax}"
CONV = """net (float[batch, 3, 24, 24] x) => (float[batch, 10] y) {
    [stem] c0 = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, k0, b0)  r0 = Relu (c0)
    [expand] c1 = Conv (r0, k1, b1)  r1 = Relu (c1)
    [depthwise] c2 = Conv <group = 64, pads = [1, 1, 1, 1]> (r1, k2, b2)  r2 = Relu (c2)
    [project] c3 = Conv (r2, k3, b3)  a = Add (c3, r0)
    [last] c4 = Conv <pads = [1, 1, 1, 1]> (a, k4, b4)  r4 = Relu (c4)
    p = GlobalAveragePool (r4)  f = Flatten (p)
    [head] y = Gemm (f, w5, b5)
}"""
KERNELS = {"k0": (32, 3, 3, 3), "k1": (64, 32, 1, 1), "k2": (64, 1, 3, 3), "k3": (32, 64, 1, 1), "k4": (48, 32, 3, 3)}


def save_conv_net(folder):
    """A model and its data: channels of very different sizes."""
    random = np.random.default_rng(3)
    weights = {"w5": random.normal(size=(48, 10)), "b5": random.normal(size=10)}
    for name, shape in KERNELS.items():
        sizes = np.exp(random.normal(size=shape[0])).reshape(-1, 1, 1, 1)
        weights[name] = random.normal(size=shape) * sizes / np.sqrt(np.prod(shape[1:]))
        weights[f"b{name[1]}"] = random.normal(size=shape[0])
    (folder / "calibration").mkdir(parents=True)
    np.savez(folder / "calibration" / "net.npz", x=random.normal(size=(40, 3, 24, 24)).astype(np.float32))
    return save_onnx(folder / "net.onnx", CONV, **{name: w.astype(np.float32) for name, w in weights.items()})


def save_encoder(folder):
    """The encoder with enough samples for ranges that hold for others."""
    source = encoder.save_project(folder)
    encoder.save_samples(folder / "calibration" / "encoder.npz", count=200)
    return source


@pytest.mark.parametrize(
    ("save", "precision"),
    [(save_encoder, "int8"), (save_conv_net, "int8"), (save_conv_net, "int8+bf16"), (save_conv_net, "int8+fp32")],
)
def test_full_recipe_is_more_accurate_and_needs_no_more_kernels(save, precision, tmp_path):
    source = save(tmp_path / "project")
    manifests = []
    for name, recipe in (("full", FULL), ("plain", PLAIN)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(recipe)
        result = trtforge.build(source, precision=precision, recipe=path, output=tmp_path / name, gpu="sm_86")
        manifests.append(result.manifest)
    full, plain = manifests
    assert full.plan.kernels <= plain.plan.kernels
    assert full.plan.gemm == plain.plan.gemm
    assert full.precision.gemm_flops_fraction == plain.precision.gemm_flops_fraction
    assert full.precision.gemm_flops_fraction["int8"] > 0.7
    lost, lost_by_plain = (1 - manifest.parity.outputs["y"].cosine for manifest in manifests)
    assert lost < lost_by_plain
