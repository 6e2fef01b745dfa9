"""Which node runs in what, and why; what was fused, and what nearly was.

Everything here comes from the compiled plan, except the reasons, which come from the passes that took the decision.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from trtforge.manifest import Manifest, PlanInfo
from trtforge.report import figures
from trtforge.report.markup import (
    NOTHING,
    Column,
    Html,
    block,
    code,
    el,
    fold,
    join,
    long_table,
    names,
    note,
    section,
    table,
)

_Key = TypeVar("_Key", bound=Hashable)


def precision(manifest: Manifest) -> Html:
    """The section on types."""
    info = manifest.precision
    return section(
        "precision",
        "Precision",
        block("GEMM and convolution FLOPs by type", _share_bar(info.gemm_flops_fraction)),
        block("Attention product FLOPs by type", _share_bar(info.attention_flops_fraction)),
        block("Nodes with weights by type", _node_counts(info.nodes), _node_table(info.node_types)),
        block("What runs in which type", _kinds(manifest.plan)),
        _kept_float(manifest),
    )


def fusion(manifest: Manifest) -> Html:
    """The section on regions that were rewritten, those that stayed, and those that nearly were."""
    done = [entry for entry in manifest.fusion if entry.reason is None]
    stayed = _grouped(((e.pattern, e.reason), e.region) for e in manifest.fusion if e.reason is not None)
    rewritten = _grouped(((entry.pattern, entry.lowered_to), entry.region) for entry in done)
    columns = [Column("Pattern"), Column("Lowered to"), Column("Regions", "number"), Column("First node", "name")]
    rows = [[pattern, code(to), str(len(nodes)), names(nodes)] for (pattern, to), nodes in rewritten.items()]
    missed = _grouped(((entry.pattern, entry.reason), entry.node) for entry in manifest.near_misses)
    stayed_rows, missed_rows = (
        [[pattern, reason, str(len(nodes)), names(nodes)] for (pattern, reason), nodes in group.items()]
        for group in (stayed, missed)
    )
    missed_columns = [
        Column("Pattern"),
        Column("Why not", "name"),
        Column("Regions", "number"),
        Column("At node", "name"),
    ]
    return section(
        "fusion",
        "Fusion",
        block("Rewritten regions", long_table(columns, rows)),
        block("Regions that stayed as they were", long_table(missed_columns, stayed_rows)),
        block("Near misses", long_table(missed_columns, missed_rows)),
    )


def share_bar(parts: Sequence[tuple[str, float, str, str]]) -> Html:
    """A bar of parts with a legend.

    Args:
        parts: label, share of 1, the share as text, class in the style sheet.
    """
    visible = [part for part in parts if part[1] > 0]
    if not visible:
        return NOTHING
    bar = (
        el("i", class_=style, style=f"flex-grow:{share:.6f}", title=f"{label} {text}")
        for label, share, text, style in visible
    )
    legend = (
        el("li", el("i", class_=style), el("span", label), " ", el("b", text)) for label, _, text, style in visible
    )
    return join([el("div", *bar, class_="bar"), el("ul", *legend, class_="legend")])


def _share_bar(shares: Mapping[str, float]) -> Html:
    return share_bar(
        [(figures.type_name(t), share, figures.percent(share), figures.type_class(t)) for t, share in shares.items()]
    )


def _node_counts(nodes: Mapping[str, int]) -> Html:
    present = [(dtype, number) for dtype, number in nodes.items() if number]
    if not present:
        return NOTHING
    pairs = (el("span", figures.type_chip(dtype), f" {number:,}") for dtype, number in present)
    return el("p", *pairs, class_="counts")


def _node_table(types: Mapping[str, str]) -> Html:
    """Every weighted node and attention product with its type, folded away."""
    rows = [[code(node), figures.type_chip(dtype)] for node, dtype in types.items()]
    content = table([Column("Node", "name"), Column("Type")], rows, filterable=True)
    return fold(f"Every node ({len(rows):,})", content) if rows else NOTHING


def _kinds(plan: PlanInfo) -> Html:
    """Kernels grouped by kind and operand types."""
    groups: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[tuple[str, ...]]] = {}
    for layer in plan.layers:
        reads = tuple(sorted({figures.type_name(tensor.dtype) for tensor in figures.main_operands(layer.inputs)}))
        writes = tuple(sorted({figures.type_name(tensor.dtype) for tensor in figures.main_operands(layer.outputs)}))
        groups.setdefault((layer.type, reads, writes), []).append(layer.onnx_nodes)
    columns = [
        Column("Kind"),
        Column("Reads"),
        Column("Writes"),
        Column("Kernels", "number"),
        Column("ONNX nodes", "name"),
    ]
    rows = []
    for (kind, reads, writes), covered in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        nodes = list(dict.fromkeys(node for layer in covered for node in layer))
        listed = fold(figures.count(len(nodes), "node"), names(nodes, keep=len(nodes))) if nodes else "-"
        rows.append([code(kind), _chips(reads), _chips(writes), f"{len(covered):,}", listed])
    return long_table(columns, rows)


def _chips(dtypes: Iterable[str]) -> Html:
    return join(join([figures.type_chip(dtype), " "]) for dtype in dtypes)


def _kept_float(manifest: Manifest) -> Html:
    entries = manifest.precision.kept_float
    groups = _grouped((entry.reason, entry.node) for entry in entries)
    columns = [Column("Why", "name"), Column("Nodes", "number"), Column("Which", "name")]
    rows = [[reason, f"{len(nodes):,}", names(nodes)] for reason, nodes in groups.items()]
    about = f"{figures.count(len(entries), 'node')} kept in a wider type than asked for, grouped by reason."
    return block("Kept in a wider type", note(about), long_table(columns, rows)) if rows else NOTHING


def _grouped(pairs: Iterable[tuple[_Key, str]]) -> dict[_Key, list[str]]:
    groups: dict[_Key, list[str]] = {}
    for key, node in pairs:
        groups.setdefault(key, []).append(node)
    return groups
