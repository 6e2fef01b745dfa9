"""PyTorch's and ONNX's forms of a block compute the same block. On the CPU: arithmetic, never time."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from native_stubs import TENSORRT_LIBRARIES, TENSORRT_SYMBOLS, compile_library, run_python

from trtforge.benchmark import tensorrt_peers
from trtforge.benchmark.arrays import HostArrays, TorchArrays, bits_from_values
from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.onnx_block import plugin_model, standard_model, variant_of
from trtforge.benchmark.operands import make_operands
from trtforge.benchmark.reference import K_RMS_OF_PEERS, Reference, calibrated
from trtforge.benchmark.torch_peers import TORCH_PEERS, TorchBlock
from trtforge.ops.attention_ffn import function_from_variant

CASES = (
    BlockCase(2, 33, 64, 2, 96),
    BlockCase(2, 33, 64, 2, 96, "fp16", "causal", "pre", "silu"),
    BlockCase(3, 17, 64, 2, 96, "int8", "lengths", "post", "relu"),
    BlockCase(1, 33, 96, 3, 64, "fp16", "bias", "pre", "gelu_tanh"),
)
BF16 = BlockCase(2, 33, 64, 2, 96, "bf16", "lengths", "pre")


@pytest.mark.parametrize("name", [name for name in TORCH_PEERS if name != "compile"])
@pytest.mark.parametrize("case", [*CASES, BF16], ids=lambda case: case.key)
def test_pytorch_computes_the_same_block(name: str, case: BlockCase) -> None:
    pytest.importorskip("torch")
    operands = calibrated(case, make_operands(case), HostArrays())
    block = TorchBlock(name, case, operands, "cpu")
    block.prepare("call")()
    reference = Reference(case, operands, TorchArrays("cpu"), is_quantized=False)
    verdict = reference.judge(block.output(), block.rms_limit)
    assert verdict.is_right, verdict.describe()


def test_the_graph_that_is_compiled_is_whole() -> None:
    torch = pytest.importorskip("torch")
    case = CASES[1]
    operands = make_operands(case)
    block = TorchBlock("compile", case, operands, "cpu")
    # The "eager" backend traces as inductor does, and needs no C++ compiler.
    compiled = torch.compile(block._compute, fullgraph=True, dynamic=False, backend="eager")
    block.y = compiled(block.values["x"])
    verdict = Reference(case, operands, TorchArrays("cpu")).judge(block.output(), block.rms_limit)
    assert verdict.is_right, verdict.describe()


def test_a_peer_that_computes_something_else_is_not_right() -> None:
    pytest.importorskip("torch")
    operands = make_operands(CASES[0])
    block = TorchBlock("sdpa", dataclasses.replace(CASES[0], mask="causal"), operands, "cpu")
    block.prepare("call")()
    assert not Reference(CASES[0], operands, TorchArrays("cpu")).judge(block.output(), block.rms_limit).is_right


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
@pytest.mark.parametrize("form", ["plugin", "standard"])
def test_the_models_for_tensorrt_compute_the_same_block(case: BlockCase, form: str) -> None:
    operands = calibrated(case, make_operands(case), HostArrays())
    model = plugin_model(case, operands) if form == "plugin" else standard_model(case, operands)
    if form == "plugin":
        model.functions.append(function_from_variant(variant_of(case)))
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    (y,) = session.run(None, {"x": bits_from_values(operands.values["x"], case.element_type)})
    y = y.copy()
    for sample, length in enumerate(case.lengths):
        y[sample, length:] = 0  # standard operators compute padding too
    verdict = Reference(case, operands, HostArrays()).judge(y, K_RMS_OF_PEERS)
    assert verdict.is_right, verdict.describe()


def test_without_its_plugin_the_plugins_model_means_nothing() -> None:
    model = plugin_model(CASES[0], make_operands(CASES[0]))
    assert [node.op_type for node in model.graph.node] == [variant_of(CASES[0]).op_type]
    assert not model.functions
    with pytest.raises(Exception, match="AttentionFFN_post_gelu"):
        onnxruntime.InferenceSession(model.SerializeToString())


@pytest.mark.parametrize("case", [BF16, *CASES], ids=lambda case: case.key)
def test_the_standard_form_has_one_attention_and_one_packed_product(case: BlockCase) -> None:
    model = standard_model(case, calibrated(case, make_operands(case), HostArrays()))
    ops = [node.op_type for node in model.graph.node]
    assert (ops.count("Attention"), ops.count("MatMul")) == (1, 4)
    assert ops.count("QuantizeLinear") == (4 if case.dtype == "int8" else 0)
    kind = onnx.TensorProto.BFLOAT16 if case.dtype == "bf16" else onnx.TensorProto.FLOAT16
    assert model.graph.input[0].type.tensor_type.elem_type == kind


BUILD_WITH_RTX = """
import sys
import tensorrt_rtx as trt
from trtforge.benchmark.tensorrt_peers import build_plan
from trtforge.errors import BuildError
log = trt.Logger(trt.Logger.ERROR)
try:
    print(memoryview(build_plan(trt, log, open(sys.argv[1], "rb").read())).nbytes)
except BuildError as err:
    print(err.why)
"""


@pytest.mark.parametrize("case", [BF16, *CASES], ids=lambda case: case.key)
def test_the_standard_form_builds(case: BlockCase, tmp_path: Path) -> None:
    """With TensorRT-RTX, whose builder needs no GPU and has the same names; attention stays one fused layer."""
    pytest.importorskip("tensorrt_rtx")
    model = standard_model(case, calibrated(case, make_operands(case), HostArrays()))
    path = tmp_path / "block.onnx"
    path.write_bytes(model.SerializeToString())
    assert int(run_python(BUILD_WITH_RTX, str(path)).split()[-1]) > 1000


def test_what_the_builder_refuses_is_an_error_with_its_reason(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    model = standard_model(CASES[0], make_operands(CASES[0]))
    model.graph.node[0].op_type = "NoSuchOperator"
    path = tmp_path / "block.onnx"
    path.write_bytes(model.SerializeToString())
    assert "Plugin not found" in run_python(BUILD_WITH_RTX, str(path))


# Classes of the objects that the peer calls by these names.
CLASSES = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
}
LOOK_UP = """
import importlib, json, sys
module = importlib.import_module("tensorrt_bindings")
missing = []
for name in json.loads(sys.argv[1]):
    value = module
    for part in name.split("."):
        value = getattr(value, part, None)
    missing += [name] if value is None else []
print(json.dumps(missing))
"""


def names_used(source: str) -> set[str]:
    """`trt.X.Y` in a source text, and members of objects by CLASSES (`builder.x`, `self.engine.x`)."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        parts: list[str] = []
        value: Any = node
        while isinstance(value, ast.Attribute):
            parts.insert(0, value.attr)
            value = value.value
        root = value.id if isinstance(value, ast.Name) else ""
        if root == "self" and len(parts) > 1:
            root, parts = parts[0], parts[1:]
        if root == "trt" and parts:
            found.add(".".join(parts))
        elif root in CLASSES and parts:
            found.add(f"{CLASSES[root]}.{parts[0]}")
    return found


def test_every_name_of_tensorrt_that_the_peer_uses_exists(tmp_path: Path) -> None:
    """Names, not behaviour: TensorRT itself needs a GPU."""
    if importlib.util.find_spec("tensorrt_bindings") is None:
        pytest.skip("the wheel tensorrt-cu13-bindings is not installed (extra dev)")
    for name in TENSORRT_LIBRARIES:
        compile_library(tmp_path / name, "".join(f"void *{s}(void) {{ return 0; }}\n" for s in TENSORRT_SYMBOLS))
    names = names_used(Path(tensorrt_peers.__file__).read_text())
    assert {"IExecutionContext.execute_async_v3", "Runtime.deserialize_cuda_engine", "get_plugin_registry"} <= names
    assert json.loads(run_python(LOOK_UP, json.dumps(sorted(names)), libraries=tmp_path)) == []
    made_up = json.dumps(["Builder.make_fast", "IExecutionContext.execute_v2"])
    assert json.loads(run_python(LOOK_UP, made_up, libraries=tmp_path)) == ["Builder.make_fast"]
