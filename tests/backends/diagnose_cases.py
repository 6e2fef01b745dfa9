"""One small model per message of the builders, and the messages that only text can produce here."""

from __future__ import annotations

import dataclasses

import numpy as np
from backend_cases import batch


@dataclasses.dataclass(frozen=True)
class Case:
    """A model that TensorRT-RTX refuses.

    Attributes:
        cause: of the diagnosis.
        text: the graph; nodes without a name are node0, node1 ...
        profile: ranges of its inputs.
        node, op: what is blamed; None and "" for the model.
        why: part of the reason.
        shapes: what the node reads; None where that is not looked at.
        constants: initializers.
        opset: of the model.
    """

    cause: str
    text: str
    profile: dict
    node: str | None
    op: str
    why: str
    shapes: tuple[str, ...] | None = None
    constants: dict = dataclasses.field(default_factory=dict)
    opset: int = 20


def fixed(*dims):
    """A shape that never changes."""
    return (dims,) * 3


X = {"x": batch(8)}
XZ = {"x": batch(8), "z": batch(8)}
IMAGE = {"x": fixed(1, 4, 16, 16)}
HEADS = {name: fixed(1, 2, 16, 32) for name in "qkv"}
IN_OUT = "g (float[b,8] x) => (float[b,8] y)"
TO_IMAGE = "g (float[1,4,16,16] x) => (float[n,c,h,w] y)"
QKV = "g (float[1,2,16,32] q, float[1,2,16,32] k, float[1,2,16,32] v)"
QDQ = "{ q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }"
WEIGHT = {"w": np.ones((4, 4, 3, 3), np.float32)}

CASES = (
    Case(
        "missing-operator", f"{IN_OUT} {{ a = Relu(x) y = Foo(a) }}", X, "node1", "Foo",
        "TensorRT-RTX has no operator Foo",
    ),
    Case("missing-operator", "g (float[b,8] x) => (int64[2,n] y) { y = NonZero(x) }", X, "node0", "NonZero",
         "TensorRT-RTX has no operator NonZero", ("x float32[-1, 8]",)),
    Case(
        "needs-gpu",
        "g (float[1,4,16,16] x, float[4,4] r, int64[4] i) => (float[n,c,h,w] y) { "
        "y = RoiAlign<output_height=4,output_width=4>(x,r,i) }",
        IMAGE | {"r": fixed(4, 4), "i": fixed(4)}, "node0", "RoiAlign",
        "with its plugin ROIAlign, which can only be made on a machine with a GPU",
    ),
    Case("nonzero-zero-point", f"{IN_OUT} <float s={{0.1}}, int8 z={{3}}> {QDQ}", X, "node0", "QuantizeLinear",
         "TensorRT-RTX takes symmetric quantization only"),
    Case("runtime-zero-point",
         "g (float[b,8] x, int8[] z) => (float[b,8] y) { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }",
         {**X, "z": fixed()}, "node0", "QuantizeLinear", "a zero-point is computed at run time",
         constants={"s": np.float32(0.1)}),
    Case("invalid-scale", f"{IN_OUT} <float s={{-1}}, int8 z={{0}}> {QDQ}", X, "node0", "QuantizeLinear",
         "a quantization scale is zero"),
    Case(
        "int32-dequantize",
        f"{IN_OUT} <int32[8] w={{1,2,3,4,5,6,7,8}}, float s={{0.1}}, int32 z={{0}}> "
        "{ d = DequantizeLinear(w, s, z) y = Add(x, d) }",
        X, "node0", "DequantizeLinear", "it dequantizes INT32, usually a quantized bias",
    ),
    Case("dynamic-quantization", "g (float[b,8] x) => (uint8[b,8] y, float s, uint8 z) "
         "{ y, s, z = DynamicQuantizeLinear(x) }", X, "node0", "DynamicQuantizeLinear",
         "DynamicQuantizeLinear belongs to dynamic"),
    Case("dynamic-quantization", "g (int8[b,8] x) => (int32[b,1] y) <int8[8,1] w={1,2,3,4,5,6,7,8}> "
         "{ y = MatMulInteger(x, w) }", X, "node0", "MatMulInteger", "MatMulInteger belongs to dynamic"),
    Case("sequence", "g (float[2,8] x) => (float[1,8] y) { s = SplitToSequence(x) y = SequenceAt(s,i) }",
         {"x": fixed(2, 8)}, "node0", "SplitToSequence", "SplitToSequence works on sequences",
         constants={"i": np.array(0)}),
    Case("unsupported-use", "g (int64[b,8] x) => (int64[b,8] y) { y = BitwiseNot(x) }", X, "node0", "BitwiseNot",
         "TensorRT-RTX does not support this use of BitwiseNot and gives no reason"),
    Case("profile-shapes", "g (float[b,8] x, float[c,8] z) => (float[b,8] y) { y = Add(x, z) }",
         {"x": batch(8), "z": ((2, 8), (3, 8), (8, 8))}, "node0", "Add",
         "optimisation profile 0 does not fit the model at OPT: node0: dimensions not compatible",
         ("x float32[-1, 8]", "z float32[-1, 8]")),
    Case("profile-fixed-dim", f"{IN_OUT} {{ y = Relu(x) }}", {"x": batch(9)}, None, "",
         "profile 0 gives axis 1 of input 'x' the range min=9, opt=9, max=9, but the model fixes it to 8"),
    Case("input-type", "g (uint16[b,8] x) => (uint16[b,8] y) { y = Add(x, x) }", X, None, "",
         "input 'x' has an element type that TensorRT-RTX does not have"),
    Case("constant-type", f"{IN_OUT} {{ u = Cast<to=1>(w) y = Add(x, u) }}", X, None, "",
         "constant 'w' has an element type that", constants={"w": np.ones(8, np.uint16)}),
    Case("operator-type", "g (uint8[b,8] x) => (uint8[b,8] y) { y = Mul(x, x) }", X, "node0", "Mul",
         "Mul does not take UInt8", ("x uint8[-1, 8]", "x uint8[-1, 8]")),
    Case("operator-type", "g (float[b,8] x, float[b,8] z) => (float[b,8] y) { y = ScatterND(x, z, x) }", XZ, "node0",
         "ScatterND", "ScatterND does not take Float"),
    Case("operator-type", f"{IN_OUT} {{ a = Cast<to=18>(x) y = Cast<to=1>(a) }}", X, "node0", "Cast",
         "Cast reads or makes a type that TensorRT-RTX does not have there"),
    Case("operator-type", f"{IN_OUT} {{ a = Cast<to=22>(x) y = Cast<to=1>(a) }}", X, "node0", "Cast",
         "Int4 exists only between Q/DQ operators and constants", opset=21),
    Case("operator-type", "g (int4[8] x) => (float[8] y) { y = Cast<to=1>(x) }", {"x": fixed(8)}, "node0", "Cast",
         "Int4 exists only between Q/DQ operators and constants", opset=21),
    Case("mixed-types", "g (float[b,8] x, float16[b,8] z) => (float[b,8] y) { y = Add(x, z) }", XZ, "node0", "Add",
         "its inputs have different element types", ("x float32[-1, 8]", "z float16[-1, 8]")),
    Case("runtime-constant", "g (float[b,8] x, int64[1] z) => (float[b,1] y) { y = ReduceSum(x, z) }",
         {**X, "z": fixed(1)}, "node0", "ReduceSum", "an input of ReduceSum is computed at run time"),
    Case("runtime-constant", "g (float[b,8] x, int64[1] z) => (float[p,q,r] y) { y = Unsqueeze(x, z) }",
         {**X, "z": fixed(1)}, "node0", "Unsqueeze", "an input of Unsqueeze is computed at run time"),
    Case("float-shape", "g (float[1,4,16,16] x, float[4] z) => (float[n,c,h,w] y) { y = Resize(x,,z) }",
         IMAGE | {"z": fixed(4)}, "node0", "Resize", "input 'z' decides a size at run time but is no integer"),
    Case("runtime-weight", "g (float[1,4,16,16] x, float[4,4,p,p] z) => (float[n,c,h,w] y) { y = Conv(x,z) }",
         IMAGE | {"z": fixed(4, 4, 3, 3)}, "node0", "Conv", "its weight is computed at run time"),
    Case("deconv-dilation",
         f"{TO_IMAGE} {{ a = Relu(x) [up] y = ConvTranspose<dilations=[2,2],strides=[2,2]>(a,w) }}",
         IMAGE, "up", "ConvTranspose", "TensorRT-RTX has no ConvTranspose with a stride and a dilation",
         ("a float32[1, 4, 16, 16]", "w float32[4, 4, 3, 3]"), WEIGHT),
    Case("pool-dilation", f"{TO_IMAGE} {{ y = MaxPool<kernel_shape=[3,3],dilations=[2,2]>(x) }}", IMAGE, "node0",
         "MaxPool", "TensorRT-RTX has no MaxPool with a dilation"),
    Case("pool-rank", "g (float[1,4,16] x) => (float[n,c,h] y) { y = LpPool<kernel_shape=[3],p=2>(x) }",
         {"x": fixed(1, 4, 16)}, "node0", "LpPool", "TensorRT-RTX pools two or three axes only"),
    Case("extra-outputs", "g (float[1,4,16,16] x) => (float[n,c,h,w] y, int64[n,c,h,w] i) "
         "{ y, i = MaxPool<kernel_shape=[3,3]>(x) }", IMAGE, "node0", "MaxPool", "gives only the first output of"),
    Case("resize-mode", f"{TO_IMAGE} <float[4] s={{1,1,2,2}}> "
         '{ y = Resize<coordinate_transformation_mode="half_pixel_symmetric">(x,,s) }', IMAGE, "node0", "Resize",
         "TensorRT-RTX does not have this mode of Resize"),
    Case("scatter-reduction", 'g (float[b,8] x, int64[b,8] z) => (float[b,8] y) { a = Relu(x) '
         'y = ScatterElements<axis=1, reduction="add">(a, z, x) }', XZ, "node1", "ScatterElements",
         "ScatterElements has no reduction in TensorRT-RTX",
         ("a float32[-1, 8]", "z int64[-1, 8]", "x float32[-1, 8]")),
    Case("integer-mod", f"{IN_OUT} {{ y = Mod(x, x) }}", X, "node0", "Mod", "Inputs cannot be of floating point types"),
    Case("lp-norm", f"{TO_IMAGE} {{ y = LpPool<kernel_shape=[3,3],p=3>(x) }}", IMAGE, "node0", "LpPool",
         "TensorRT-RTX has the norms of order 1 and 2 only"),
    Case("training-mode", f"{TO_IMAGE} {{ y, m, v = BatchNormalization<training_mode=1>(x,s,s,s,s) }}", IMAGE, "node0",
         "BatchNormalization", "the model was exported in training mode", constants={"s": np.ones(4, np.float32)}),
    Case("topk-limit", "g (float[1,9000] x) => (float[p,q] y, int64[p,q] i) <int64[1] k={5000}> { y, i = TopK(x,k) }",
         {"x": fixed(1, 9000)}, "node0", "TopK", "TopK of TensorRT-RTX takes at most 3840 elements"),
    Case("invalid-attribute", f"{TO_IMAGE} {{ y = Softmax<axis=77>(x) }}", IMAGE, "node0", "Softmax",
         "an attribute or a size of Softmax is out of the range"),
    Case("invalid-attribute", f"{TO_IMAGE} {{ y = Conv<strides=[0,0]>(x,w) }}", IMAGE, "node0", "Conv",
         "an attribute or a size of Conv is out of the range", constants=WEIGHT),
    Case("uneven-split", "g (float[3,8] x) => (float[p,8] y, float[q,8] z, float[r,8] u, float[s,8] v, float[t,8] w) "
         "{ y, z, u, v, w = Split<num_outputs=5>(x) }", {"x": fixed(3, 8)}, "node0", "Split",
         "its sizes do not add up to the axis that it splits"),
    Case("attention-cache", f"{QKV} => (float[1,2,32,32] y, float[1,2,32,32] p, float[1,2,32,32] r) "
         "{ y, p, r = Attention(q,k,v,,k,v) }", HEADS, "node0", "Attention",
         "Attention of TensorRT-RTX takes no cache", opset=23),
    Case("attention-option", f"{QKV} => (float[1,2,16,32] y) {{ y = Attention<softcap=2.0>(q,k,v) }}", HEADS, "node0",
         "Attention", "Attention of TensorRT-RTX has no softcap", opset=23),
    Case("cache-scatter", "g (float[2,3,4,5] x, float[2,3,1,5] z, int64[2] i) => (float[2,3,4,5] y) "
         "{ a = Relu(x) y = TensorScatter(a, z, i) }",
         {"x": fixed(2, 3, 4, 5), "z": fixed(2, 3, 1, 5), "i": fixed(2)}, "node1", "TensorScatter",
         "TensorScatter of TensorRT-RTX takes a cache", opset=24),
    Case("branch-ranks",
         "g (float[b,8] x, float[1] z) => (float[p,q] y) { t = ReduceMax<keepdims=0>(z) c = Greater(t,k) a = Relu(x) "
         "[pick] y = If(c) <then_branch = t () => (float[b,8,1] u) { u = Unsqueeze(a,ax) }, "
         "else_branch = e () => (float[b,8] v) { v = Relu(a) }> }",
         {**X, "z": fixed(1)}, "pick", "If", "the branches of an If give results of different rank",
         constants={"ax": np.array([2]), "k": np.float32(0)}),
    Case("trip-count", "g (float[b,8] x) => (float[n,b,8] y) { s, y = Loop(,c,x) <body = bd (int64 i, bool ci, "
         "float[b,8] si) => (bool co, float[b,8] so, float[b,8] out) { so = Relu(si) m = ReduceMax<keepdims=0>(so) "
         "co = Greater(m,k) out = Neg(so) }> }", X, "node0", "Loop", "the Loop has no trip count",
         constants={"c": np.array(True), "k": np.float32(0)}),
    Case("squeeze-axes", "g (float[b,c,8] x) => (float[n] y) { y = Squeeze(x) }", {"x": batch(1, 8)}, "node0",
         "Squeeze", "Squeeze names no axes"),
    Case("internal-error",
         "g (float[b,8] x, bool c) => (float[b,8] y) { y = If(c) <then_branch = t () => (float[b,8] u) { u = If(c) "
         "<then_branch = t2 () => (float[b,8] u2) { u2 = Relu(x) }, else_branch = e2 () => (float[b,8] v2) "
         "{ v2 = Neg(x) }> }, else_branch = e () => (float[b,8] v) { v = Abs(x) }> }",
         {**X, "c": fixed()}, None, "", "TensorRT-RTX fails inside on this combination of nodes, types and shapes"),
    Case("no-kernel", "g (float[1,10,4] x, float[1,1,10] z) => (int64[n,3] y) { y = NonMaxSuppression(x,z,m,t,t) }",
         {"x": fixed(1, 10, 4), "z": fixed(1, 1, 10)}, "node0", "NonMaxSuppression",
         "TensorRT-RTX has no kernel for NonMaxSuppression in this form",
         constants={"m": np.array(3), "t": np.float32(0.5)}),
    Case("missing-tensor", f"{IN_OUT} {{ y = Add(x,nothing) }}", X, "node0", "Add",
         "it reads a tensor that nothing before it makes"),
    Case("shape-mismatch", "g (float[b,8] x) => (float[4,n] y) <int64[2] s={3,11}, int64[2] t={4,-1}> "
         "{ a = Reshape(x, s) y = Reshape(a, t) }", X, "node1", "Reshape", "shapes inside the model do not fit"),
    Case("shape-mismatch", "g (float[b,8] x) => (float[n,m] y) { y = MatMul(x,w) }", X, "node0", "MatMul",
         "last dimension of input0 = 8 and second to last dimension of input1 = 9",
         constants={"w": np.ones((9, 4), np.float32)}),
    Case("missing-operator",
         "g (float[b,8] x, bool c) => (float[b,8] y) { y = If(c) <then_branch = t () => (float[b,8] u) "
         "{ [inner] u = Foo(x) }, else_branch = e () => (float[b,8] v) { v = Relu(x) }> }",
         X, "inner", "Foo", "TensorRT-RTX has no operator Foo"),
)  # fmt: skip
"""Refused by the real builder."""

TEXTS = (
    ("mixed-types", "n4: must have `thenInput` and `elseInput` of same types but has Half and Float.", "n4"),
    ("no-kernel", "Error Code 10: Could not find any implementation for node {ForeignNode[n4...n5]}.", "n4"),
    ("out-of-memory", "[virtualMemoryBuffer.cpp] Error Code 2: OutOfMemory (Requested size was 9 bytes.)", None),
    ("out-of-memory", "std::bad_alloc", None),
    ("workspace", "[tactic.cpp:1676] no tactics to implement the operation within workspace limit.", None),
    ("branch-ranks", "graphScope: dimensions of n4_OutputLayer are kUNDEFINED", "n4"),
    ("attention-kernel", "MyelinCheckException: decompose_composite_ops.cpp:59: CHECK(composite_op->is_decomposable()) "
     "failed.", None),
    ("profile-dim-name", "Input dimensions with this name have different constant values: ?", None),
    ("profile-missing", "Network has dynamic or shape inputs, but no optimization profile has been defined.", None),
    ("type-of-target", "model contains HW-specific datatypes: b16", None),
    ("type-of-target", "model contains HW-specific datatypes: fp8_e4m3", None),
    ("kernel-of-target", "n4: for Turing (SM75): FP32 3D convolution is not supported.", "n4"),
    ("odd-4-bit", "Assertion failed: (inputSize % 2 == 0): 4-bit quantization requies an even number of elements.",
     None),
    ("cache-scatter", "Assertion failed: cacheDims == 4: The past_cache tensor is required to be 4D, got 3D.", None),
    ("circular-size", "Invalid Node - n4\nInternal Error (Assertion !isInFlight(p.second.symbolicRep) failed. )", "n4"),
    ("internal-error", "Myelin ([myelin_graph.h:1: attach] MyelinCheckException: a.cpp:2: CHECK(false) failed. at n4)",
     "n4"),
    ("operator-type", "n4: Found unsupported input type of INT16", "n4"),
    ("operator-type", "Tensor output has datatype FP4 but is not produced by IPluginLayer, IQuantizeLayer", None),
    ("unknown", "the moon is in the wrong phase at n4", "n4"),
)  # fmt: skip
"""Cause, message and blamed node of messages that no model produces here, or that another builder prints."""
