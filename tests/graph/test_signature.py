from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from graph_models import graph_of

from trtforge.errors import InputError
from trtforge.graph.signature import input_specs, is_float32, output_specs
from trtforge.tensor import TensorSpec


def test_fixed_named_and_open_sizes_are_told_apart() -> None:
    graph = graph_of("g (float[batch, ?, 3] x, int64[1] n) => (bfloat16[batch] y) { y = F(x, n) }")
    assert input_specs(graph) == (
        TensorSpec("x", "float32", ("batch", None, 3)),
        TensorSpec("n", "int64", (1,)),
    )
    assert output_specs(graph) == (TensorSpec("y", "bfloat16", ("batch",)),)


def test_unknown_rank_is_none() -> None:
    graph = graph_of("g (float x) => (float8e4m3fn y) { y = F(x) }")
    graph.inputs[0].shape = None
    assert input_specs(graph)[0].shape is None
    assert output_specs(graph)[0].dtype == "float8_e4m3fn"


def test_output_without_a_type_is_refused() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    graph.outputs[0].dtype = None
    with pytest.raises(InputError, match="'y' has no known element type") as caught:
        output_specs(graph)
    assert caught.value.why and caught.value.fix


def test_float32_is_recognised_by_its_known_type_only() -> None:
    assert is_float32(gs.Variable("a", np.float32))
    assert is_float32(gs.Variable("a", np.dtype(np.float32)))
    for dtype in (None, np.float16, onnx.TensorProto.BFLOAT16):
        assert not is_float32(gs.Variable("a", dtype))
