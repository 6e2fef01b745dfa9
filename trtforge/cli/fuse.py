"""`trtforge fuse`: which attention, FFN and transformer blocks are found, and why others are not."""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import options
from trtforge.cli.render import plain, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trtforge.fusing import FuseResult
    from trtforge.fusion.regions import Attention, AttentionFfnBlock, Ffn, Mask, Region

NAME = "fuse"
# Places shown of those that share a reason.
_MAX_SHOWN = 10


def command(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The model: an .onnx file.", show_default=False)],
    explain: Annotated[bool, typer.Option("--explain", help="Say of each near miss where it stopped and why.")] = False,
    profile: options.ProfileOption = None,
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Show the regions that can be fused, with the node of every role; --explain tells why others cannot."""
    from trtforge.fusing import find_fusions
    from trtforge.limits import DEFAULT_LIMITS

    result = find_fusions(source, profile, DEFAULT_LIMITS.override(limit or ()))
    if as_json:
        print_json(result.to_dict())
    else:
        _print_result(result, explain)
    return 0


def _print_result(result: FuseResult, explain: bool) -> None:
    for region in result.matches.regions:
        sys.stdout.write(f"{region.pattern} {plain(region.name)}: {plain(', '.join(_facts(region)))}\n")
        print_table([(role, node) for role, node in region.roles().items() if node is not None])
    num_misses = len(result.matches.near_misses)
    _print_forms(result)
    if explain:
        _print_near_misses(result)
    counts = result.counts()
    sys.stdout.write(
        f"{plain(str(result.model))}: {counts['attention_ffn_block']} blocks, {counts['attention']} attentions, "
        f"{counts['ffn']} FFNs in {result.num_nodes} nodes; {num_misses} near misses"
        f"{' (--explain tells why)' if num_misses and not explain else ''}\n"
    )


def _print_forms(result: FuseResult) -> None:
    """What a build makes of the regions, for each kind of target; regions of one fate are counted."""
    from trtforge.fusing import NATIVE

    groups = collections.Counter((form.target, form.pattern, form.lowered_to, form.reason) for form in result.forms)
    for (target, pattern, lowered_to, reason), count in groups.items():
        fate_text = f"unchanged: {reason}" if lowered_to is None else f"as {lowered_to}"
        where = " where the plan is not worse" if lowered_to is not None and target == NATIVE else ""
        sys.stdout.write(f"{target}: {count} {pattern} {plain(fate_text)}{where}\n")


def _print_near_misses(result: FuseResult) -> None:
    """Near misses by pattern and reason; a reason that many share is said once."""
    groups: dict[tuple[str, str], list[str]] = {}
    for miss in result.matches.near_misses:
        groups.setdefault((miss.pattern, miss.reason), []).append(f"{miss.anchor}: stopped at {miss.node}")
    for (pattern, reason), places in groups.items():
        sys.stdout.write(f"no {pattern}: {plain(reason)}\n")
        for place in places[:_MAX_SHOWN]:
            sys.stdout.write(f"  {plain(place)}\n")
        if len(places) > _MAX_SHOWN:
            sys.stdout.write(f"  ... and {len(places) - _MAX_SHOWN} more (--json shows all)\n")


def _facts(region: Region) -> Iterator[str]:
    """What is known of a region, in words."""
    from trtforge.fusion.regions import Attention, Ffn

    if isinstance(region, Attention):
        yield from _attention_facts(region)
    elif isinstance(region, Ffn):
        yield from _ffn_facts(region)
    else:
        yield from _block_facts(region)


def _block_facts(block: AttentionFfnBlock) -> Iterator[str]:
    yield f"{block.order}-norm"
    yield from _attention_facts(block.attention)
    yield from _ffn_facts(block.ffn)
    yield f"epsilon {block.norm1.epsilon:.3g}"


def _attention_facts(attention: Attention) -> Iterator[str]:
    grouped = "" if attention.num_kv_heads == attention.num_heads else f" ({attention.num_kv_heads} of key and value)"
    yield f"{attention.num_heads} heads{grouped} of {attention.head_size}"
    yield f"scale {attention.softmax_scale:.4g}"
    yield from _mask_facts(attention.mask)


def _mask_facts(mask: Mask) -> Iterator[str]:
    if mask.is_causal:
        yield "causal"
    if mask.key_padding is not None:
        yield f"key padding by {mask.key_padding.tensor}"
    if mask.terms and not mask.is_explained:
        yield f"mask {mask.terms[-1].tensor}"


def _ffn_facts(ffn: Ffn) -> Iterator[str]:
    yield f"{ffn.activation.kind} of {ffn.up.width}"
