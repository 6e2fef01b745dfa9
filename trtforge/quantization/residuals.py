"""Residual Adds of convolutional networks: the skip input is read in INT8 where it is stored in INT8 anyway.

    x ----------------> Add          x is quantized for the convolution. Read in float by the Add, it is
     `-> Q/DQ -> Conv ---'           written twice, in float and in INT8; with one pair for both, once.

The branch that comes from the convolution stays float, so that it fuses with the Add. The plans of TensorRT-RTX 1.7.1
(ResNet and C2f blocks) move 3 to 18 % fewer bytes. Three kinds of residuals stay float:

1.  The skip input has another float reader: it is written twice either way.
2.  Its convolutions widen it (inverted residuals): it is the narrowest tensor of its block. On EfficientNet-lite0 it
    saved 1 % of the bytes and cost 3 points of top-1 agreement.
3.  Its readers are MatMuls, as in post-norm transformers: on MiniLM it saved 7 % of the bytes and the pooled cosine
    fell from 0.987 to 0.983.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import onnx_graphsurgeon as gs

from trtforge.quantization.shared_scales import passes_values

# What may lie between the branch's last convolution and the Add.
_BRANCH_OPS = frozenset(("BatchNormalization", "Clip", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Mul", "PRelu"))
_BRANCH_OPS |= {"Add", "Elu", "Relu", "Sigmoid"}
_MAX_STEPS = 8


def skip_inputs(
    graph: gs.Graph, quantized: Mapping[tuple[str, int], str]
) -> Iterator[tuple[gs.Node, int, tuple[str, ...]]]:
    """The residual Adds whose skip input is quantized too.

    Args:
        graph: the main graph counts.
        quantized: (node name, input index) of what is quantized otherwise -> the tensor.

    Yields:
        The Add, the index of its skip input, and the nodes that have to be quantized with it.
    """
    outputs = {tensor.name for tensor in graph.outputs}
    stored = set(quantized.values())
    needs: dict[int, tuple[str, ...]] = {}
    for node in graph.nodes:
        if node.op != "Add" or len(node.inputs) != 2:
            continue
        for index, tensor in enumerate(node.inputs):
            if id(tensor) not in needs:
                needs[id(tensor)] = () if tensor.name in outputs else _convolutions_reading(tensor, quantized, stored)
            if needs[id(tensor)] and _ends_a_branch(node.inputs[1 - index]):
                yield node, index, needs[id(tensor)]
                break


def _convolutions_reading(
    tensor: gs.Tensor, quantized: Collection[tuple[str, int]], stored: Collection[str]
) -> tuple[str, ...]:
    """The quantized convolutions that read a tensor beside one Add; () where anything reads it in the float type."""
    names = []
    num_adds = 0
    for reader in tensor.outputs:
        if reader.op == "Add":
            num_adds += 1
        elif reader.op == "Conv":
            if reader.inputs[0] is not tensor or (reader.name, 0) not in quantized or _widens(reader):
                return ()
            names.append(reader.name)
        elif not passes_values(reader) or not any(output.name in stored for output in reader.outputs):
            return ()
    return tuple(names) if num_adds == 1 and tensor.inputs else ()


def _widens(conv: gs.Node) -> bool:
    """True for more output than input channels, and where the weight's shape [M, C/g, k...] is unknown."""
    shape = conv.inputs[1].shape
    return not shape or bool(shape[0] > shape[1] * conv.attrs.get("group", 1))


def _ends_a_branch(tensor: gs.Tensor) -> bool:
    """True when the tensor comes straight from a convolution, through its activation or a gate."""
    for _ in range(_MAX_STEPS):
        producer = tensor.inputs[0] if tensor.inputs else None
        if producer is None:
            return False
        if producer.op == "Conv":
            return True
        if producer.op not in _BRANCH_OPS or (producer.op == "Add" and _num_activations(producer) > 1):
            return False
        tensor = producer.inputs[0] if not isinstance(producer.inputs[0], gs.Constant) else producer.inputs[1]
    return False


def _num_activations(node: gs.Node) -> int:
    return sum(not isinstance(tensor, gs.Constant) for tensor in node.inputs)
