"""FFN: x [.., H] -> up [.., F] -> activation -> down [.., H].

Found from its second product: what that reads, followed back through element-wise nodes, is one tensor, and that is
the output of a linear layer. Two projections that are multiplied are a gated FFN, which is a near miss.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trtforge.fusion.activation import KINDS, activation_of, chain_behind
from trtforge.fusion.linear import Linears, rows_of
from trtforge.fusion.regions import Ffn, Linear
from trtforge.fusion.view import StoppedError, View, op_name


def match_ffn(view: View, linears: Linears, product: gs.Node, down: Linear) -> Ffn | None:
    """The FFN that ends with a product; None where nothing element-wise lies before it.

    Raises:
        StoppedError: an activation that is not known, or a gate.
    """
    tensor = rows_of(view, product.inputs[0])
    chain = chain_behind(tensor, lambda start: linears.behind(start) is not None)
    ups = [linears.behind(start) for start in chain.starts]
    if not chain.nodes or not ups or any(up is None for up in ups):
        return None
    if len(ups) > 1:
        gate = next((node for node in chain.nodes if op_name(node) == "Mul"), None)
        if gate is None or len(ups) > 2:
            return None
        raise StoppedError(gate, "the FFN is gated: two projections are multiplied")
    up = ups[0]
    assert up is not None
    if up.x == down.x or up.product == down.product:
        return None
    activation = activation_of(view, chain, tensor)
    if activation is None:
        ops = ", ".join(dict.fromkeys(str(node.op) for node in reversed(chain.nodes)))
        raise StoppedError(chain.nodes[0], f"{ops} is none of the activations {', '.join(KINDS)}")
    if view.only_reader(tensor) is None:
        raise StoppedError(chain.nodes[0], "its activation is also read elsewhere")
    return Ffn(down.product, up, activation, down)
