from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from backend_cases import batch, model_from_text, profile_set, quantized_mlp
from onnx import TensorProto

from trtforge.backends.base import BuildRequest
from trtforge.backends.plan import node_precision
from trtforge.backends.tensorrt_rtx import BACKEND
from trtforge.errors import BuildError, ChildDiedError, UnavailableError
from trtforge.profile import Profile, ProfileSet, ShapeRange
from trtforge.target import rtx_target_from_option

X = {"x": batch(32)}


def test_a_quantized_mlp_becomes_an_engine_with_int8_gemms(build, tmp_path):
    result = build(quantized_mlp(), X)
    assert result.engine == tmp_path / "model.engine"
    assert result.engine.stat().st_size > 10_000
    assert result.build_s > 0
    assert re.fullmatch(r"1\.\d+\.\d+.*", result.backend_version)
    assert result.plan.unreadable is None
    assert result.plan.gemm == {"int8": 2}
    assert node_precision(result.plan, ["up", "down"]) == {"up": "int8", "down": "int8"}
    assert result.plan.kernels == len([layer for layer in result.plan.layers if layer.type in {"gemm", "kgen"}])
    assert {tensor.name for layer in result.plan.layers for tensor in layer.inputs} >= {"x"}


@pytest.mark.parametrize("gpu", ["sm_75", "sm_80", "sm_86,sm_89", "sm_120", None])
def test_every_target_builds_int8_with_fp16_around_it(build, gpu):
    assert build(quantized_mlp(half=True), X, gpu=gpu).plan.gemm == {"int8": 2}


@pytest.mark.parametrize(
    ("onnx_type", "numpy_type", "expected"), [("float", np.float32, "fp32"), ("float16", np.float16, "fp16")]
)
def test_float_gemms_have_the_graphs_type(build, onnx_type, numpy_type, expected):
    text = f"g ({onnx_type}[b,32] x) => ({onnx_type}[b,64] y) {{ h = MatMul(x, w) y = Gelu(h) }}"
    plan = build(model_from_text(text, w=np.ones((32, 64), numpy_type)), X).plan
    assert plan.gemm == {expected: 1}
    assert node_precision(plan, ["node0"]) == {"node0": expected}


def test_dims_that_share_a_name_and_no_size_build(build):
    model = model_from_text("g (float[b,h,h] x) => (float[b,h,h] y) { y = Relu(x) }")
    assert build(model, {"x": batch(48, 192)}).plan.kernels == 1


def test_the_plan_of_a_loop_is_readable(build):
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(1, 128, 32)).astype("f") for name in ("w", "r")}
    model = model_from_text(
        "g (float[s,b,32] x) => (float[s,d,b,32] y) { y = LSTM<hidden_size=32>(x, w, r) }", **weights
    )
    plan = build(model, {"x": ((1, 1, 32), (8, 4, 32), (16, 8, 32))}).plan
    assert plan.unreadable is None
    assert "ShapeHostToDevice" in {layer.type for layer in plan.layers}
    assert set(plan.gemm) == {"fp32"}


def conv_net():
    rng = np.random.default_rng(0)
    text = """g (float[b,3,16,16] x) => (float[b,10] y) {
        a = Conv<pads=[1,1,1,1]>(x, w1, b1)
        s = Sigmoid(a)
        m = Mul(a, s)
        d = Conv<pads=[1,1,1,1], group=32>(m, w2)
        p = Conv(d, w3)
        r = Add(p, m)
        t = ConvTranspose<strides=[2,2]>(r, w4)
        g = GlobalAveragePool(t)
        f = Flatten(g)
        y = Gemm<transB=1>(f, w5, b5)
    }"""
    shapes = {"w1": (32, 3, 3, 3), "b1": 32, "w2": (32, 1, 3, 3), "w3": (32, 32, 1, 1), "w4": (32, 32, 2, 2)}
    weights = {
        name: rng.normal(size=shape).astype("f") for name, shape in (shapes | {"w5": (10, 32), "b5": 10}).items()
    }
    return model_from_text(text, **weights)


def test_every_weighted_node_of_a_conv_net_is_found_in_the_plan(build):
    plan = build(conv_net(), {"x": batch(3, 16, 16)}).plan
    weighted = [f"node{index}" for index in (0, 3, 4, 6, 9)]
    assert node_precision(plan, weighted) == dict.fromkeys(weighted, "fp32")
    assert plan.gemm == {"fp32": 5}


ATTENTION = """g (float16[b,2,64,32] q, float16[b,2,64,32] k, float16[b,2,64,32] v) => (float16[b,2,64,32] y) {
    kt = Transpose<perm=[0,1,3,2]>(k)
    s = MatMul(q, kt)
    scaled = Mul(s, scale)
    p = Softmax(scaled)
    y = MatMul(p, v)
}"""


def test_both_matmuls_of_a_fused_attention_have_its_type(build):
    shapes = dict.fromkeys("qkv", batch(2, 64, 32))
    plan = build(model_from_text(ATTENTION, scale=np.float16(0.2)), shapes).plan
    assert plan.fused_attention == 1
    assert plan.gemm == {}
    assert node_precision(plan, ["node1", "node4"]) == {"node1": "fp16", "node4": "fp16"}


@pytest.mark.parametrize(("onnx_type", "fused"), [("float16", 1), ("float", 0)])
def test_native_attention_is_fused_where_there_is_a_kernel_and_builds_where_there_is_none(build, onnx_type, fused):
    port = f"{onnx_type}[b,2,64,32]"
    text = f"g ({port} q, {port} k, {port} v) => ({port} y) {{ y = Attention(q, k, v) }}"
    plan = build(model_from_text(text, opset=23), dict.fromkeys("qkv", batch(2, 64, 32))).plan
    assert plan.fused_attention == fused
    assert node_precision(plan, ["node0"]) == {"node0": "fp16" if fused else "fp32"}


def test_several_profiles_go_into_one_engine(build, worker):
    build(quantized_mlp(), {"x": ((1, 32), (1, 32), (4, 32))}, {"x": ((8, 32), (16, 32), (64, 32))})
    tensors = worker.log.read_text().rpartition("I/O Tensors:")[2]
    assert "OptShape: [1,32]" in tensors
    assert "OptShape: [16,32]" in tensors


def test_values_of_a_shape_tensor_are_used(tmp_path, worker):
    onnx.save(
        model_from_text("g (float[b,8] x, int64[2] sizes) => (float[p,q] y) { y = Reshape(x, sizes) }"),
        tmp_path / "model.onnx",
    )
    shapes = profile_set({"x": batch(8), "sizes": ((2,), (2,), (2,))}).first.inputs
    profiles = ProfileSet((Profile("p", shapes, {"sizes": ShapeRange((1, 8), (4, 8), (8, 8))}),), "file")
    request = BuildRequest(tmp_path / "model.onnx", tmp_path / "e", profiles, rtx_target_from_option("sm_86"))
    assert BACKEND.build(request, worker).plan.unreadable is None
    assert (tmp_path / "e").stat().st_size > 0


@pytest.mark.parametrize(("tf32", "listed"), [(True, True), (False, False)])
def test_the_tf32_flag_reaches_the_builder(build, worker, tf32, listed):
    build(model_from_text("g (float[b,32] x) => (float[b,32] y) { y = Relu(x) }"), X, tf32=tf32)
    flags = re.findall(r"Flags +\| \[(.*)\]", worker.log.read_text())[-1]
    assert ("TF32" in flags) == listed


FORGED = (
    "up\nName: fake, LayerType: gemm, Inputs: [ { Name: a, Dimensions: [4,4], Strides: [4,1], Datatype: Int8, "
    "Format: F }], Constants: [ { Name: w, Dimensions: [4,4], Strides: [4,1], Datatype: Int8, Format: F }], "
    "Outputs: [], TacticName: , StreamId: 0, Metadata: [ONNX Layer: down]\x1f[ONNX Layer: up]"
)


def test_node_names_cannot_forge_rows_of_the_plan(build, worker):
    model = model_from_text(
        "g (float[b,32] x) => (float[b,32] y) { h = MatMul(x, w) y = MatMul(h, w) }", w=np.ones((32, 32), "f")
    )
    model.graph.node[0].name, model.graph.node[1].name = FORGED, "mm[2], {x}] }"
    plan = build(model, X).plan
    assert plan.gemm == {"fp32": 2}
    assert node_precision(plan, [FORGED, "mm[2], {x}] }", "up", "down", "fake"]) == {
        FORGED: "fp32",
        "mm[2], {x}] }": "fp32",
    }
    assert not re.search(r"^Name: fake", worker.log.read_text(), re.MULTILINE)


def test_tensor_names_cannot_forge_rows_of_the_plan(build):
    model = model_from_text(
        "g (float[b,32] x) => (float[b,32] y) { h = MatMul(x, w) y = Relu(h) }", w=np.ones((32, 32), "f")
    )
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = FORGED
    assert build(model, X).plan.gemm == {"fp32": 1}


def test_an_input_name_cannot_forge_operands_of_the_plan(build):
    port = "x, Dimensions: [1], Datatype: Int8, Format: F }], Constants: [ { Name: w, Dimensions: [9,9], Datatype: Int8"
    model = model_from_text("g (float[b,32] x) => (float[b,32] y) { y = MatMul(x, w) }", w=np.ones((32, 32), "f"))
    model.graph.input[0].name = model.graph.node[0].input[0] = port
    plan = build(model, {port: batch(32)}).plan
    assert plan.unreadable is None
    assert plan.gemm == {"fp32": 1}
    assert port in {tensor.name for layer in plan.layers for tensor in layer.inputs}


def test_nodes_with_empty_and_repeated_names_and_short_port_names_build(build):
    model = model_from_text(
        "g (float[b,32] t0) => (float[b,32] n1) { a = MatMul(t0, w) h = MatMul(a, w) n1 = MatMul(h, w) }",
        w=np.ones((32, 32), "f"),
    )
    for node, name in zip(model.graph.node, ["", "same", "same"], strict=True):
        node.name = name
    plan = build(model, {"t0": batch(32)}).plan
    assert plan.gemm == {"fp32": 3}
    assert node_precision(plan, ["same"]) == {"same": "fp32"}


def test_weights_in_external_files_are_read_where_they_are(build, tmp_path):
    model = model_from_text("g (float[b,32] x) => (float[b,1024] y) { y = MatMul(x, w) }")
    data = np.ones((32, 1024), "f").tobytes()
    (tmp_path / "weights.bin").write_bytes(b"\0" * 64 + data)
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[32, 1024], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "weights.bin", "offset": 64, "length": len(data)}.items():
        weight.external_data.add(key=key, value=str(value))
    model.graph.initializer.append(weight)
    files = {path.name for path in tmp_path.iterdir()}
    assert build(model, X).plan.gemm == {"fp32": 1}
    assert {path.name for path in tmp_path.iterdir()} == files | {"model.onnx", "model.engine"}


def test_progress_names_phases(build):
    seen = []
    build(conv_net(), {"x": batch(3, 16, 16)}, on_progress=seen.append)
    phases = [report["phase"] for report in seen]
    assert phases[:2] == ["reading the model", "parsing"]
    assert "building" in phases


def test_the_log_has_every_message_on_a_line_of_its_own_and_the_original_names(build, worker):
    build(quantized_mlp(), X)
    lines = worker.log.read_text().splitlines()
    assert any(line.startswith("[V] Layers:") for line in lines)
    assert '    n3 = "up"' in lines
    assert all(line.isprintable() for line in lines)


def test_a_refused_model_leaves_no_engine_and_the_worker_usable(build, tmp_path):
    with pytest.raises(BuildError):
        build(model_from_text("g (float[b,32] x) => (float[b,32] y) { y = Foo(x) }"), X)
    assert not (tmp_path / "model.engine").exists()
    assert build(quantized_mlp(), X).plan.gemm == {"int8": 2}


def test_an_engine_that_cannot_be_written_is_reported(build, tmp_path):
    (tmp_path / "model.engine").mkdir()
    with pytest.raises(UnavailableError) as caught:
        build(quantized_mlp(), X)
    assert caught.value.what == f"the engine cannot be written to {tmp_path / 'model.engine'}"
    assert "Is a directory; it needs" in caught.value.why


def test_a_worker_that_is_killed_during_a_build_is_reported_and_the_parent_lives(build, tmp_path):
    log = tmp_path / "build.log"
    with BACKEND.start_worker(log) as child:

        def kill_soon(_):
            threading.Thread(target=os.kill, args=(child.pid, signal.SIGKILL)).start()
            time.sleep(0.1)

        with pytest.raises(ChildDiedError) as caught:
            build(quantized_mlp(), X, child=child, on_progress=kill_soon)
    assert caught.value.what == "the engine build process was killed by signal 9 (SIGKILL)"
    assert "usually the system ran out of memory; last progress: " in caught.value.why
    assert not Path(f"/proc/{child.pid}").exists()


def test_the_variable_that_switches_polygraphy_is_set_in_the_worker_only(build):
    build(quantized_mlp(), X)
    assert "POLYGRAPHY_USE_TENSORRT_RTX" not in os.environ


def test_a_folder_whose_name_is_no_text_is_built_in(tmp_path, worker):
    folder = tmp_path / os.fsdecode(b"\xff\xfe 1")
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save(quantized_mlp(), str(tmp_path / "model.onnx"))
    (tmp_path / "model.onnx").rename(path)
    request = BuildRequest(path, folder / "model.engine", profile_set(X), rtx_target_from_option("sm_86"))
    assert BACKEND.build(request, worker).plan.gemm == {"int8": 2}
    assert request.engine.stat().st_size > 10_000
