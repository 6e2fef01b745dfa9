"""Which targets TensorRT-RTX builds FP8, INT4 and INT8 weights for, and what their products run in."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from quant_cases import graph_from_text, normal

from trtforge.backends.base import BuildRequest
from trtforge.backends.plan import node_precision
from trtforge.backends.tensorrt_rtx import BACKEND
from trtforge.errors import BuildError, InputError
from trtforge.graph.save import save_model
from trtforge.profile import Profile, ProfileSet, ShapeRange
from trtforge.quantization.cast import cast_graph
from trtforge.quantization.formats import FORMATS, FP8
from trtforge.quantization.placement import plan_placement
from trtforge.quantization.qdq import insert_qdq
from trtforge.quantization.weight_only import plan_weight_only
from trtforge.quantization.weight_only_graph import choose_weights
from trtforge.recipe import QuantRecipe
from trtforge.target import check_quantization, rtx_target_from_option

PRODUCT = "g (float[b, 16, 256] x) => (y) { [n] h = MatMul(x, w) y = Relu(h) }"
GEMM = "g (float[b, 256] x) => (y) { [n] h = Gemm<transB=1>(x, w, bias) y = Relu(h) }"
CONV = "g (float[b, 64, 8, 8] x) => (y) { [n] h = Conv(x, w) y = Relu(h) }"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    if find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed")
    return tmp_path_factory.mktemp("worker") / "build.log"


@pytest.fixture
def plan_of(log, tmp_path):
    """The plan of a float graph quantized in one way, at batch 1 to 8, built in a process of its own."""

    def build(text, quantization, gpu, tail, **weights):
        graph = graph_from_text(text, **weights)
        if quantization == "fp8":
            placement = plan_placement(graph, {}, QuantRecipe())
            insert_qdq(graph, placement, dict.fromkeys(placement.tensors, 4.0), np.float16, number_format=FP8)
        else:
            number_format = FORMATS[quantization]
            placement = plan_weight_only(graph, QuantRecipe(), number_format)
            choose_weights(graph, placement, number_format, {}, np.float16, lambda *_: None).insert(graph)
        cast_graph(graph, "float16")
        path = tmp_path / "model.onnx"
        save_model(graph, path)
        profiles = ProfileSet((Profile("p", {"x": ShapeRange((1, *tail), (4, *tail), (8, *tail))}),), "file")
        request = BuildRequest(path, tmp_path / "model.engine", profiles, rtx_target_from_option(gpu))
        with BACKEND.start_worker(log) as worker:
            return BACKEND.build(request, worker, None).plan

    return build


@pytest.mark.parametrize("quantization", ["fp8", "int4", "int8-weights"])
@pytest.mark.parametrize("gpu", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_120"])
def test_the_builder_takes_what_the_check_lets_through_and_nothing_else(plan_of, quantization, gpu):
    try:
        check_quantization(rtx_target_from_option(gpu), quantization)
    except InputError:
        with pytest.raises(BuildError, match="which not every target has"):
            plan_of(PRODUCT, quantization, gpu, (16, 256), w=normal(256, 64))
        return
    plan = plan_of(PRODUCT, quantization, gpu, (16, 256), w=normal(256, 64))
    assert node_precision(plan, ["n"]) == {"n": "fp8" if quantization == "fp8" else "fp16"}


@pytest.mark.parametrize(("quantization", "codes"), [("int4", "int4"), ("int8-weights", "int8")])
@pytest.mark.parametrize("gpu", ["sm_80", "sm_120"])
def test_weights_are_read_in_their_format_inside_the_gemm(plan_of, quantization, codes, gpu):
    plan = plan_of(GEMM, quantization, gpu, (256,), w=normal(64, 256), bias=normal(64))
    (gemm,) = [layer for layer in plan.layers if layer.is_gemm]
    assert set(gemm.operand_dtypes) == {"fp16", codes}
    assert plan.gemm == {"mixed": 1}


def test_turing_expands_weights_in_a_kernel_of_its_own(plan_of):
    plan = plan_of(PRODUCT, "int8-weights", "sm_75", (16, 256), w=normal(256, 64))
    assert plan.gemm == {"fp16": 1}
    assert any(tensor.dtype == "int8" for layer in plan.layers for tensor in layer.constants)


def test_convolutions_run_in_fp8_and_with_stored_weights(plan_of):
    weight = normal(64, 64, 3, 3)
    assert node_precision(plan_of(CONV, "fp8", "sm_89", (64, 8, 8), w=weight), ["n"]) == {"n": "fp8"}
    plan = plan_of(CONV, "int8-weights", "sm_86", (64, 8, 8), w=weight)
    assert node_precision(plan, ["n"]) == {"n": "fp16"}
    assert any(tensor.dtype == "int8" for layer in plan.layers for tensor in layer.constants)


def test_transposed_convolution_with_stored_weights_builds(plan_of):
    text = "g (float[b, 64, 8, 8] x) => (y) { [n] h = ConvTranspose<strides=[2, 2]>(x, w) y = Relu(h) }"
    plan = plan_of(text, "int8-weights", "sm_86", (64, 8, 8), w=normal(64, 32, 2, 2))
    assert node_precision(plan, ["n"]) == {"n": "fp16"}
