"""Which regions of a model can be fused, and why others cannot; nothing is run or written."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import onnx_graphsurgeon as gs

from trtforge.fusion.lower_attention import LOWERED_TO, attention_refusals
from trtforge.fusion.lower_block_node import block_forms
from trtforge.fusion.match import match_regions
from trtforge.fusion.packed_qkv import pack_qkv
from trtforge.fusion.regions import Matches, region_to_dict
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise
from trtforge.graph.signature import input_specs
from trtforge.graph.specialise import specialise
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.ops.attention_ffn import DOMAIN
from trtforge.profile_choice import profile_file
from trtforge.profile_sources import load_profiles
from trtforge.stages import LoweredRegion, load_source

NATIVE, PLUGIN = "tensorrt-rtx, tensorrt", "tensorrt --plugin"
"""What a build is for: any backend without a plugin library, and TensorRT with one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form(LoweredRegion):
    """What a half-precision build makes of a region. A native form is kept where the plan is not worse.

    Attributes:
        target: `NATIVE` or `PLUGIN`; an attention is listed for `NATIVE` also where it is part of a block.
    """

    target: str


@dataclasses.dataclass(frozen=True, slots=True)
class FuseResult:
    """The regions of a model, in the form that a build works on: normalised, and folded for its profile.

    Attributes:
        model: the file that was read.
        profile: the file that the ranges come from; None where every open dim stays as open as the model leaves it.
        num_nodes: of that form.
        matches: regions and near misses; their names are those of that form, which keeps the source's where it can.
        forms: what a build makes of them.
    """

    model: Path
    profile: Path | None
    num_nodes: int
    matches: Matches
    forms: tuple[Form, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values.

        `regions` holds, for each outermost region, its `pattern` ("attention_ffn_block", "attention" or "ffn"), `roles`
        {role: node}, and the fields of `fusion.regions`. `near_misses` holds the nearest `pattern`, the `anchor` that
        the search started from, the `node` where it stopped and the `reason`. `counts` counts inner regions too.
        `forms` holds what a build makes of a `region`, by `target`: `lowered_to`, or null and the `reason`.
        """
        return {
            "model": str(self.model),
            "profile": None if self.profile is None else str(self.profile),
            "num_nodes": self.num_nodes,
            "counts": self.counts(),
            "regions": [region_to_dict(region) for region in self.matches.regions],
            "near_misses": [dataclasses.asdict(miss) for miss in self.matches.near_misses],
            "forms": [dataclasses.asdict(form) for form in self.forms],
        }

    def counts(self) -> dict[str, int]:
        """Number of regions by pattern; those inside a block count too."""
        return {
            "attention_ffn_block": len(self.matches.blocks()),
            "attention": len(self.matches.attentions()),
            "ffn": len(self.matches.ffns()),
        }


def find_fusions(source: Path, profile: str | None = None, limits: Limits = DEFAULT_LIMITS) -> FuseResult:
    """Match the regions of an ONNX file.

    Args:
        source: the ONNX file.
        profile: a profile file or the name of a shipped one; by default that of the conventions, where there is one.
        limits: bounds on untrusted input.

    Raises:
        InputError: no ONNX file, one that breaks a rule of `graph.load`, or a profile that does not fit.
        ChildDiedError: the child process that runs onnx's C++ crashed.
    """
    loaded = load_source(source, limits)
    path = profile_file(profile, source)
    profiles = None if path is None else load_profiles(path, input_specs(loaded.graph), limits)
    with OnnxNative() as native:
        graph, _ = normalise(loaded.graph, native=native, operators="float")
        if profiles is not None:
            specialise(graph, profiles, native)
    matches, num_nodes = match_regions(graph), len(graph.nodes)
    respelled = pack_qkv(graph).rewritten  # what a half-precision build does first
    forms = _forms_of(graph, match_regions(graph) if respelled else matches)
    return FuseResult(source, path, num_nodes, matches, forms)


def _forms_of(graph: gs.Graph, matches: Matches) -> tuple[Form, ...]:
    """What a half-precision build makes of attentions and blocks."""
    refusals = attention_refusals(graph, matches.attentions())
    op_types, unfit = block_forms(graph, matches.blocks())
    forms = []
    for region in matches.attentions():
        reason = refusals.get(region.name)
        lowered_to = LOWERED_TO if reason is None else None
        forms.append(Form(region.name, region.pattern, lowered_to, reason, target=NATIVE))
    for block in matches.blocks():
        lowered_to = f"{DOMAIN}::{op_types[block.name]}" if block.name in op_types else None
        forms.append(Form(block.name, block.pattern, lowered_to, unfit.get(block.name), target=PLUGIN))
    return tuple(forms)
