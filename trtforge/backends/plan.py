"""The compiled plan: which kernels an engine has, in which types, covering which ONNX nodes.

layer_table.py reads it from a build's log, inspection_json.py from the engine inspector. Rows echo names of nodes and
tensors, so the model is built under short names (graph/names.py); the names of its inputs and outputs stay, and are
known. What the rows mean (TensorRT-RTX 1.7.1, read off real plans; names of layers outside the compiled graph, such as
CaskConvolution, from TensorRT's documentation):

1. A GEMM is a row of type gemm, correlation (Conv), deconv (ConvTranspose), or one that ends in Convolution,
   Deconvolution or MatrixMultiply, or a row whose kernel name holds the word Fc, Corr or Deco:
   `__myl_FcAddDivErfAddMulMul`. `_gemm_mha*` is a fused attention and counted apart.
2. A GEMM's operands are its first data input and its weight, the largest constant; without a constant matrix they are
   its first two data inputs. The other operands are alpha, beta, bias and residual, of no account for the type.
3. A GEMM is int8 only when both operands are Int8; operands of two types make it mixed, and the node it computes runs
   in the wider one.
4. Rows without work (shape_call, signal, wait, jumps of a loop, copies of a shape's values, NoOp) are no kernels.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from trtforge.manifest import PlanInfo, PlanLayerEntry, PlanTensor

_NOT_KERNELS = frozenset(["shape_call", "signal", "wait", "cjmp", "jmp", "reshape", "ShapeHostToDevice", "NoOp"])
_GEMM_TYPES = re.compile(r"gemm|correlation|deconv|\w*(Convolution|Deconvolution|MatrixMultiply)(V\d+)?")
_GEMM_WORDS = frozenset(["Fc", "Corr", "Deco"])
_ATTENTION = "_gemm_mha"
# The table's element types, under the names of manifest and report.
_DTYPES = {
    "Float": "fp32",
    "Half": "fp16",
    "BFloat16": "bf16",
    "Int8": "int8",
    "FP8": "fp8",
    "Int4": "int4",
    "FP4": "fp4",
    "Int32": "int32",
    "Int64": "int64",
    "UInt8": "uint8",
    "Bool": "bool",
}
# Types that a multiplication can run in, narrowest first.
_WIDTHS = {"fp4": 0, "int4": 1, "int8": 2, "fp8": 3, "fp16": 4, "bf16": 5, "fp32": 6}
_BUILDER_SUFFIX = re.compile(r"_myl\d+_\d+$")
_TENSOR_SUFFIX = re.compile(r"(\.\d+)?_myl\d+$")
_SPLIT_SUFFIX = re.compile(r"_U\d+$")


@dataclasses.dataclass(frozen=True, slots=True)
class OriginalNames:
    """The way back from the names that a builder's rows hold.

    Attributes:
        ports: names of the model's inputs and outputs, which stay.
        nodes: short name -> original name of the nodes.
        tensors: the same for tensors.
    """

    ports: frozenset[str]
    nodes: Mapping[str, str]
    tensors: Mapping[str, str]

    def of_row(self, builder_name: str) -> tuple[str, tuple[str, ...]]:
        """`n4+n2_myl0_7` -> the row's name and the nodes it is made of, both with original names."""
        parts = re.split(r"\s*\+\s*", _BUILDER_SUFFIX.sub("", builder_name))
        parts = [_SPLIT_SUFFIX.sub("", part) for part in parts]
        if any(part not in self.nodes for part in parts):
            return builder_name, ()
        originals = tuple(self.nodes[part] or part for part in parts)
        return "+".join(originals), originals

    def of_tensor(self, name: str) -> str:
        """`t4.1_myl0` -> the tensor's original name; the builder's own where it made the tensor."""
        return self.tensors.get(_TENSOR_SUFFIX.sub("", name)) or name

    def in_metadata(self, text: str) -> tuple[str, ...]:
        """`[ONNX Layer: n1]<0x1F>[ONNX Layer: n2]` -> the nodes' original names, each once."""
        covered = re.findall(r"\[ONNX Layer: ([^\]\x1f]*)\]", text)
        return tuple(dict.fromkeys(self.nodes.get(short) or short for short in covered))


def dtype_of(text: str) -> str:
    """The builder's name of an element type, as manifest and report have it: `Half` is fp16."""
    return _DTYPES.get(text, text.lower())


@dataclasses.dataclass(frozen=True, slots=True)
class PlanLayer:
    """One row of the table.

    Attributes:
        name: the builder's name for it, with the model's node names where it is made of them.
        type: gemm, correlation, deconv, kgen, runtime_fusion ...
        tactic: the builder's name of the kernel; a stub or empty where it is chosen when the engine is loaded.
        inputs, constants, outputs: operands; -1 marks a dynamic dim.
        onnx_nodes: nodes whose work it does, or part of it.
        main_nodes: the nodes that it is named after.
    """

    name: str
    type: str
    tactic: str
    inputs: tuple[PlanTensor, ...]
    constants: tuple[PlanTensor, ...]
    outputs: tuple[PlanTensor, ...]
    onnx_nodes: tuple[str, ...]
    main_nodes: tuple[str, ...]

    @property
    def is_kernel(self) -> bool:
        """Rule 4."""
        return self.type not in _NOT_KERNELS

    @property
    def is_attention(self) -> bool:
        """True for a fused attention."""
        return self.name.startswith(_ATTENTION)

    @property
    def is_gemm(self) -> bool:
        """Rule 1."""
        if _GEMM_TYPES.fullmatch(self.type):
            return True
        fused_ops = re.match(r"__myl_([A-Za-z]+)", self.name)
        return bool(fused_ops and _GEMM_WORDS & set(re.findall(r"[A-Z][a-z]*", fused_ops[1])))

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        """Rule 2 for a GEMM; the first two data inputs of an attention; any other kernel's data inputs."""
        data = [tensor for tensor in self.inputs if tensor.dtype in _WIDTHS]
        constants = sorted((t for t in self.constants if t.dtype in _WIDTHS), key=lambda t: -math.prod(t.shape))
        if self.is_attention:
            return tuple(tensor.dtype for tensor in data[:2])
        if not self.is_gemm:
            return tuple(tensor.dtype for tensor in [*data, *(t for t in constants if math.prod(t.shape) > 1)])
        weight_is_constant = bool(constants) and (len(data) < 2 or sum(dim > 1 for dim in constants[0].shape) > 1)
        return tuple(tensor.dtype for tensor in ([*data[:1], constants[0]] if weight_is_constant else data[:2]))

    @property
    def gemm_dtype(self) -> str:
        """Rule 3: the type that both operands have, or "mixed"."""
        dtypes = set(self.operand_dtypes)
        return dtypes.pop() if len(dtypes) == 1 else "mixed"


@dataclasses.dataclass(frozen=True, slots=True)
class EnginePlan:
    """An engine's kernels in the order in which they run.

    Attributes:
        layers: every row of the table.
        unreadable: why the table could not be read, and `layers` is empty; None when it was read.
    """

    layers: tuple[PlanLayer, ...]
    unreadable: str | None = None

    @property
    def kernels(self) -> int:
        """Number of kernels."""
        return sum(layer.is_kernel for layer in self.layers)

    @property
    def gemm(self) -> dict[str, int]:
        """Number of GEMMs and convolutions by operand type, "mixed" included; sorted by name."""
        return dict(sorted(Counter(layer.gemm_dtype for layer in self.layers if layer.is_gemm).items()))

    @property
    def fused_attention(self) -> int:
        """Number of fused attentions."""
        return sum(layer.is_attention for layer in self.layers)

    def to_info(self) -> PlanInfo:
        """The plan as the manifest holds it; a layer's constants follow its inputs."""
        layers = (
            PlanLayerEntry(
                name=layer.name,
                type=layer.type,
                inputs=layer.inputs + layer.constants,
                outputs=layer.outputs,
                onnx_nodes=layer.onnx_nodes,
            )
            for layer in self.layers
        )
        return PlanInfo(
            kernels=self.kernels,
            gemm=self.gemm,
            fused_attention=self.fused_attention,
            layers=tuple(layers),
            unreadable=self.unreadable,
        )


def node_precision(plan: EnginePlan, node_names: Iterable[str]) -> dict[str, str]:
    """The type in which each node's multiplication runs.

    The kernel that counts is the GEMM named after the node, else a GEMM or attention that covers it, else any kernel
    that covers it (a MatMul with one column becomes `__myl_MulSum`): a kernel that only rescales a GEMM's result lists
    the GEMM's node as well. Where several kernels of one rank share a node, the widest type counts.

    Args:
        plan: of the engine.
        node_names: MatMul, Gemm, Conv, ConvTranspose and Attention nodes.

    Returns:
        node -> "int8", "fp16", "bf16", "fp32" ...; a node that no kernel covers is missing.
    """
    wanted = set(node_names)
    best: dict[str, tuple[int, int, str]] = {}
    for layer in plan.layers:
        dtypes = sorted(layer.operand_dtypes, key=_WIDTHS.__getitem__)
        if not dtypes or not layer.is_kernel:
            continue
        is_multiplication = layer.is_gemm or layer.is_attention
        for node in wanted.intersection(layer.onnx_nodes + layer.main_nodes):
            rank = 2 if is_multiplication and node in layer.main_nodes else 1 if is_multiplication else 0
            best[node] = max(best.get(node, (-1, 0, "")), (rank, _WIDTHS[dtypes[-1]], dtypes[-1]))
    return {node: best[node][2] for node in sorted(best)}
