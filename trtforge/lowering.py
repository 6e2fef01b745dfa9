"""Which attention regions become `Attention` nodes: those with which the engine's plan is not worse.

How a builder fuses a spelling is read from its plan, not assumed: the whole graph is built as it is and with every
region that can be rewritten, in the precision asked for and for the target and profiles asked for. Scales do not change
a plan, so quantized graphs are tried with stand-in ranges, before anything is calibrated. Where the plan is worse,
each kind of region (`kind_of`) is tried on its own, the largest ones first, `MAX_KINDS` at most. So the usual model
costs two builds more, and one with n kinds at most n + 2; one less where a trial had the very graph that is built, as
in half precision. The rewritten nodes must become one kernel each, or the trial fails: success proves the fusion.

A plan is worse that has more kernels, fewer fused attentions, or more GEMMs in a wider type than was asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.backends.plan import EnginePlan
from trtforge.errors import InputError, TrtForgeError
from trtforge.fusion.lower_attention import LOWERED_TO, AttentionLowering, attention_refusals, kind_of
from trtforge.fusion.match import match_regions
from trtforge.fusion.regions import Attention, NearMiss
from trtforge.graph.edit import copy_graph
from trtforge.graph.native import OnnxNative
from trtforge.progress import Note
from trtforge.recipe import QuantRecipe
from trtforge.spec import FLOAT_DTYPES, Precision
from trtforge.stages import Lowered, LoweredRegion, Prepared, RegionReport, lower, plan_quantization

# Kinds of region that are tried alone: each takes a build of the whole graph.
MAX_KINDS = 8

# How the builder does a graph, whose named `Attention` nodes must become one kernel each; or why it does not.
Measure = Callable[[gs.Graph, tuple[str, ...]], EnginePlan | TrtForgeError]


@dataclasses.dataclass(frozen=True, slots=True)
class Candidates:
    """The attention regions of a graph.

    Attributes:
        regions: that can be rewritten.
        unfit: why others cannot, by region.
        near_misses: places that are none.
    """

    regions: tuple[Attention, ...]
    unfit: Mapping[str, str]
    near_misses: tuple[NearMiss, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What the trials told.

    Attributes:
        lowered: names of the regions to rewrite.
        kept: why the other candidates stay, by region.
    """

    lowered: tuple[str, ...]
    kept: dict[str, str]


def find_candidates(
    graph: gs.Graph, precision: Precision, recipe: QuantRecipe, *, leaves_blocks: bool = False
) -> Candidates:
    """Match the attention regions of a prepared graph, and say of each whether it can be rewritten.

    Args:
        leaves_blocks: those of whole blocks are left to a plugin, which takes them from the graph that is built.
    """
    matches = match_regions(graph)
    left = {block.attention.name for block in matches.blocks()} if leaves_blocks else set()
    regions = [region for region in matches.attentions() if region.name not in left]
    refusals = attention_refusals(graph, regions)
    fit, unfit = [], {}
    for region in regions:
        reason = _reason_of_recipe(region, precision, recipe) or refusals.get(region.name)
        if reason is None:
            fit.append(region)
        else:
            unfit[region.name] = reason
    misses = tuple(miss for miss in matches.near_misses if miss.pattern == Attention.pattern)
    return Candidates(tuple(fit), unfit, misses)


def _reason_of_recipe(region: Attention, precision: Precision, recipe: QuantRecipe) -> str | None:
    """Why what is asked for forbids a rewrite."""
    if precision.base == "fp32":
        return "the operator has fused kernels in fp16 and bf16 only"
    if not precision.is_calibrated:
        return None
    if recipe.attention:
        return "the recipe quantizes attention's products, and the operator ignores Q/DQ"
    from trtforge.quantization.placement import match_patterns

    parts = [part.projection for part in (region.query, region.key, region.value)]
    names = [part.linear.product for part in parts if part is not None]
    for pattern in recipe.exclude:
        try:
            match_patterns((pattern,), names)
        except InputError:  # it matches none of them
            continue
        return f"the recipe's pattern {pattern!r} names one of its projections, which would be one product"
    return None


def decide(graph: gs.Graph, candidates: Sequence[Attention], wanted: str | None, measure: Measure) -> Decision:
    """Which candidates to rewrite.

    Args:
        graph: on which they were matched; it is not changed.
        candidates: at least one.
        wanted: the type that GEMMs were asked to be quantized to; None for none.
        measure: builds a graph.
    """
    plain = measure(graph, ())
    if isinstance(plain, TrtForgeError) or plain.unreadable is not None:
        why = plain.what if isinstance(plain, TrtForgeError) else plain.unreadable
        return Decision((), {region.name: f"there is no plan to compare with: {why}" for region in candidates})

    def reason_against(regions: Sequence[Attention], best: EnginePlan) -> tuple[str | None, EnginePlan]:
        trial, names = rewrite(graph, regions)
        plan = measure(trial, names)
        if isinstance(plan, TrtForgeError):
            return f"the builder refuses it: {plan.why}", best
        return worse_by(plan, best, wanted), plan

    kinds: dict[tuple[object, ...], list[Attention]] = {}
    for region in candidates:
        kinds.setdefault(kind_of(region), []).append(region)
    reason, plan = reason_against(candidates, plain)
    if reason is None:
        return Decision(tuple(region.name for region in candidates), {})
    if len(kinds) == 1:
        return Decision((), {region.name: reason for region in candidates})
    lowered: list[Attention] = []
    kept: dict[str, str] = {}
    best = plain
    by_number = sorted(kinds.values(), key=len, reverse=True)
    for regions in by_number[MAX_KINDS:]:
        kept |= {
            region.name: f"it is tried alone only where fewer than {MAX_KINDS} kinds have more regions"
            for region in regions
        }
    for regions in by_number[:MAX_KINDS]:
        reason, plan = reason_against([*lowered, *regions], best)
        if reason is None:
            lowered += regions
            best = plan
        else:
            kept |= {region.name: reason for region in regions}
    return Decision(tuple(region.name for region in lowered), kept)


def worse_by(plan: EnginePlan, other: EnginePlan, wanted: str | None = None) -> str | None:
    """In what a plan is worse than another; None where it is not."""
    if plan.unreadable is not None:
        return f"its plan cannot be read: {plan.unreadable}"
    if plan.kernels > other.kernels:
        return f"the plan has {plan.kernels} kernels with it, {other.kernels} without"
    if plan.fused_attention < other.fused_attention:
        return f"the plan has {plan.fused_attention} fused attentions with it, {other.fused_attention} without"
    wide, before = (sum(count for dtype, count in p.gemm.items() if dtype != wanted) for p in (plan, other))
    if wanted is not None and wide > before:
        return f"{wide} GEMMs of the plan are not in {wanted} with it, {before} without"
    return None


def rewrite(graph: gs.Graph, regions: Sequence[Attention]) -> tuple[gs.Graph, tuple[str, ...]]:
    """A copy of a graph with regions rewritten, and the names of their `Attention` nodes."""
    copy = copy_graph(graph)
    lowering = AttentionLowering(copy)
    for region in regions:
        lowering.lower(region)
    return copy, lowering.finish()


def apply_decision(prepared: Prepared, candidates: Candidates, decision: Decision) -> Prepared:
    """The prepared graph with its regions rewritten, and what is said of them."""
    chosen = [region for region in candidates.regions if region.name in decision.lowered]
    graph, names = rewrite(prepared.graph, chosen) if chosen else (prepared.graph, ())
    reasons = {**candidates.unfit, **decision.kept}
    entries = [LoweredRegion(region.name, Attention.pattern, LOWERED_TO) for region in chosen]
    entries += [LoweredRegion(name, Attention.pattern, None, reason) for name, reason in reasons.items()]
    report = RegionReport(tuple(entries), candidates.near_misses, names)
    return dataclasses.replace(prepared, graph=graph, regions=report, shapes={} if chosen else prepared.shapes)


def lower_for_trial(prepared: Prepared, precision: Precision, recipe: QuantRecipe, native: OnnxNative) -> Lowered:
    """The graph in the precision asked for, with stand-in ranges; weights of weight-only formats stay float."""
    if not precision.is_calibrated:
        return lower(prepared.graph, precision, None)
    from trtforge.quantization.formats import FORMATS
    from trtforge.quantization.quantizer import Quantizer
    from trtforge.quantization.table import CalibrationTable, TensorRange

    placement = plan_quantization(prepared, recipe, native)
    nothing = "0" * 64
    table = CalibrationTable(
        method="minmax",
        samples=1,
        model_sha256=nothing,
        data_sha256=nothing,
        recipe_sha256=nothing,
        tensors={name: TensorRange(amax=1.0, min=-1.0, max=1.0, rms=1.0) for name in placement.tensors},
    )
    number_format = FORMATS[precision.quantization or "int8"]
    dtype = np.dtype(FLOAT_DTYPES[precision.base])
    return lower(prepared.graph, precision, Quantizer(placement, table, number_format, dtype))


def measure_with(
    prepared: Prepared,
    lower_graph: Callable[[Prepared], Lowered],
    build: Callable[[gs.Graph, tuple[str, ...]], EnginePlan | TrtForgeError],
    note: Note,
) -> Measure:
    """Builds forms of a prepared graph in the precision asked for, and says how far it is."""
    count = 0

    def measure(graph: gs.Graph, whole_attention: tuple[str, ...]) -> EnginePlan | TrtForgeError:
        nonlocal count
        count += 1
        note(f"trial {count}: {len(whole_attention)} regions as {LOWERED_TO}")
        form = dataclasses.replace(prepared, graph=graph, shapes={})
        return build(lower_graph(form).graph, whole_attention)

    return measure
