"""Operators that TensorRT does not take, rewritten to standard ONNX that it does.

One file per family, one registry. A rule writes the nodes that take a node's place, or raises: `NotYetError` where a
type or size is not known (a later round may know it), `RefusedError` where there is no standard form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_graphs, all_nodes, is_onnx_op, remove_dead_nodes
from trtforge.graph.intake import dynamic_int8, microsoft, microsoft_attention, ml, refusals, standard
from trtforge.graph.intake.element_types import narrow_types
from trtforge.graph.intake.emit import Emitter, needs_float32
from trtforge.graph.intake.integers import FLOAT_MARK, SCALED_MARK
from trtforge.graph.intake.rewrites import NotYetError, Refused, RefusedError, Rewrite
from trtforge.graph.names import UniqueNames

Operators = Literal["exact", "float", "keep"]
"""What becomes of operators that TensorRT does not take: rewritten with the integers of dynamic quantization kept,
rewritten with float products in their place, or nothing.
"""
Rule = Callable[[gs.Node, Emitter], Sequence[gs.Tensor | None]]

MICROSOFT, ML = "com.microsoft", "ai.onnx.ml"
# Nodes that a sentence names.
_MAX_SHOWN = 3


def _registry() -> Iterator[tuple[tuple[str, str], Rule]]:
    for domain, rules in (
        ("", standard.RULES),
        ("", dynamic_int8.STANDARD_RULES),
        (MICROSOFT, dynamic_int8.MICROSOFT_RULES),
        (MICROSOFT, microsoft.RULES),
        (MICROSOFT, microsoft_attention.RULES),
        (ML, ml.RULES),
    ):
        for op, rule in rules.items():
            yield (domain, op), rule
    # ONNX Runtime writes it without a domain.
    yield ("", "SimplifiedLayerNormalization"), microsoft.rms_norm


RULES: Mapping[tuple[str, str], Rule] = MappingProxyType(dict(_registry()))
"""Every rule by domain and operator."""


def rewrite_operators(graph: gs.Graph, *, exact_products: bool = True) -> list[Rewrite]:
    """Replace what TensorRT does not take, in place, subgraphs included; a second call finds nothing to do.

    Where types are not known yet, a node waits: call again after type inference.

    Args:
        graph: sorted, of opset 19 or newer; types as far as they are known.
        exact_products: keep the integers of dynamic quantization; else its weights become floats and its activations
            are left as they are.

    Returns:
        What was replaced, in order; `refused_operators` tells what was not.
    """
    if all(_rule_of(node) is None for node in all_nodes(graph)):
        return []
    emit = _emitter(graph, exact_products=exact_products)
    rewrites: list[Rewrite] = []
    for holder in all_graphs(graph):
        nodes: list[gs.Node] = []
        for node in holder.nodes:
            new = _replacement(node, emit)
            if new is not None:
                rewrites.append(Rewrite(full_name(node), node.name, _words(new)))
                nodes += new
            nodes.append(node)
        holder.nodes = nodes
    # The nodes replaced, and what was written for a reader that went too: codes whose only product reads the floats.
    remove_dead_nodes(graph)
    return rewrites


def leaves_out_rounding(graph: gs.Graph) -> bool:
    """Whether the activations of dynamic quantization are left as floats somewhere in a rewritten graph."""
    return any(mark in node.name for node in all_nodes(graph) for mark in (FLOAT_MARK, SCALED_MARK))


def _emitter(graph: gs.Graph, opset: int = 0, *, exact_products: bool = True) -> Emitter:
    kept = frozenset(id(tensor) for holder in all_graphs(graph) for tensor in holder.outputs)
    return Emitter(UniqueNames(graph), max(opset, graph.opset), kept, exact_products=exact_products)


def _rule_of(node: gs.Node) -> Rule | None:
    rule = RULES.get(("" if is_onnx_op(node) else node.domain, node.op))
    return rule if rule is not None and standard.is_wanted(node) else None


def is_rewritten(node: gs.Node) -> bool:
    """True for a node that TensorRT does not take and that there is a rule for."""
    return _rule_of(node) is not None


def _replacement(node: gs.Node, emit: Emitter) -> list[gs.Node] | None:
    rule = _rule_of(node)
    if rule is None:
        return None
    try:
        return emit.commit(node, _apply(rule, node, emit))
    except (NotYetError, RefusedError):
        return None


def _apply(rule: Rule, node: gs.Node, emit: Emitter) -> Sequence[gs.Tensor | None]:
    """A rule's results; what a damaged node makes it raise is a refusal."""
    emit.begin(node)
    try:
        return rule(node, emit)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as err:
        raise RefusedError(
            f"its inputs or attributes do not fit the operator ({err})", "export the model again"
        ) from err


def _words(nodes: Sequence[gs.Node]) -> str:
    ops = ", ".join(dict.fromkeys(node.op for node in nodes if node.op != "Identity")) or "its input"
    is_float_form = any(FLOAT_MARK in node.name for node in nodes)
    return f"{ops} of the floats that its codes stand for" if is_float_form else ops


def describe_rewrites(rewrites: Sequence[Rewrite]) -> list[str]:
    """One sentence for each operator that was rewritten."""
    groups: dict[tuple[str, str], list[str]] = {}
    for rewrite in rewrites:
        # Another form of the same operator, or the scale behind a product that is named itself.
        if rewrite.rule in (rewrite.what, "Mul"):
            continue
        groups.setdefault((rewrite.rule, rewrite.what), []).append(rewrite.node)
    return [
        f"{rule} became {what}: {', '.join(nodes[:_MAX_SHOWN])}"
        + (f" and {len(nodes) - _MAX_SHOWN} more nodes" if len(nodes) > _MAX_SHOWN else "")
        for (rule, what), nodes in groups.items()
    ]


def full_name(node: gs.Node) -> str:
    """Domain and operator."""
    return str(node.op) if is_onnx_op(node) else f"{node.domain}.{node.op}"


def refused_operators(
    graph: gs.Graph, opset: int = 0, concerns: Callable[[gs.Node], bool] = lambda _node: True
) -> Iterator[Refused]:
    """The nodes that TensorRT does not take and that no rule replaces, with the reason; the graph is not changed.

    Args:
        graph: sorted; types as far as they are known.
        opset: the one that a build raises the graph to first; a higher one of its own counts.
        concerns: the nodes to look at.
    """
    emit: Emitter | None = None
    for node in filter(concerns, all_nodes(graph)):
        if _rule_of(node) is not None:
            emit = emit or _emitter(graph, opset)
            refused = _refusal_of_rule(node, emit)
            if refused is not None:
                yield refused
        else:
            refused = refusals.refusal(node)
            if refused is not None:
                yield refused


def _refusal_of_rule(node: gs.Node, emit: Emitter) -> Refused | None:
    rule = _rule_of(node)
    assert rule is not None
    try:
        _apply(rule, node, emit)
    except RefusedError as err:
        return Refused(node.name, full_name(node), err.reason, err.fix)
    except NotYetError as err:
        fix = "export the model with known shapes and types"
        return Refused(node.name, full_name(node), f"it needs to know {err.missing}", fix)
    return None


__all__ = [
    "RULES",
    "Operators",
    "Refused",
    "Rewrite",
    "describe_rewrites",
    "full_name",
    "is_rewritten",
    "narrow_types",
    "needs_float32",
    "refused_operators",
    "rewrite_operators",
]
