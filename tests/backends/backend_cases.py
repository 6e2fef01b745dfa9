"""Small models and profiles for the tests of the backends."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from trtforge.profile import Profile, ProfileSet, ShapeRange

HEADER = '<ir_version: 10, opset_import: ["" : {}]>\n'


def model_from_text(text, opset=20, **initializers):
    """A model from ONNX text, with arrays as initializers and nodes named node0, node1 ... unless named."""
    model = onnx.parser.parse_model(HEADER.format(opset) + text)
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), name) for name, a in initializers.items())
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"node{index}"
    return model


def profile_set(*profiles):
    """Profiles from `{input: (min, opt, max)}`, named p0, p1 ..."""
    return ProfileSet(
        tuple(
            Profile(f"p{index}", {name: ShapeRange(*map(tuple, shapes)) for name, shapes in entries.items()})
            for index, entries in enumerate(profiles)
        ),
        "file",
    )


def batch(*dims):
    """Ranges of a shape whose first axis runs from 1 over 4 to 8."""
    return (1, *dims), (4, *dims), (8, *dims)


def quantized_mlp(half=False):
    """x [b, 32] -> MatMul [32, 64] -> Relu -> MatMul [64, 32], both MatMuls INT8 by Q/DQ."""
    dtype, name = (np.float16, "float16") if half else (np.float32, "float")
    rng = np.random.default_rng(0)
    text = f"""g ({name}[b,32] x) => ({name}[b,32] y) {{
        xq = QuantizeLinear(x, s, z)
        xd = DequantizeLinear(xq, s, z)
        wd = DequantizeLinear<axis = 1>(w, ws, wz)
        h = MatMul(xd, wd)
        r = Relu(h)
        rq = QuantizeLinear(r, s, z)
        rd = DequantizeLinear(rq, s, z)
        vd = DequantizeLinear<axis = 1>(v, vs, vz)
        y = MatMul(rd, vd)
    }}"""
    model = model_from_text(
        text,
        s=dtype(0.05),
        z=np.int8(0),
        w=rng.integers(-127, 128, (32, 64), np.int8),
        ws=rng.uniform(0.001, 0.002, 64).astype(dtype),
        wz=np.zeros(64, np.int8),
        v=rng.integers(-127, 128, (64, 32), np.int8),
        vs=rng.uniform(0.001, 0.002, 32).astype(dtype),
        vz=np.zeros(32, np.int8),
    )
    model.graph.node[3].name, model.graph.node[8].name = "up", "down"
    return model
