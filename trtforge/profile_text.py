"""Optimisation profiles as YAML: what resolved ones look like, and the template of a file with ranges to fill in.

Names come from an untrusted model. What is written reads back as it is: a dim's name is made plain, a key is quoted
where YAML would read something other than text, and a name that would mean two things is split.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from trtforge.errors import InputError
from trtforge.profile import DimFact, DimReport, ProfileSet, ShapeRange
from trtforge.tensor import TensorSpec

# Words that PyYAML reads as something other than text.
_YAML_WORDS = {"yes", "no", "on", "off", "true", "false", "null"}


def missing_ranges(specs: Sequence[TensorSpec], report: DimReport | None = None) -> InputError:
    """The error for open dimensions without a range; its fix is the YAML to fill in."""
    dynamic = [spec for spec in specs if spec.is_dynamic]
    return InputError(
        "the model has dynamic dimensions without a range",
        "; ".join(spec.describe() for spec in dynamic),
        "save this as profiles/<model name>.yaml beside the model (or give it with --profile), with your own "
        f"min/opt/max:\n\n{profile_template(specs, report)}",
    )


def profile_template(specs: Sequence[TensorSpec], report: DimReport | None = None) -> str:
    """A profile YAML for the model with the ranges left to fill in; equal dims are shared.

    Args:
        specs: the model's inputs.
        report: what the graph says of their dims: sizes that it fixes are filled in, and reasons are given.
    """
    names = dim_names(specs, report=report)
    facts = {fact.name: fact for fact in report.dims} if report is not None else {}
    ordered = list(dict.fromkeys(dim for dims in names.values() for dim in dims if isinstance(dim, str)))
    lines = ["dims:"] if ordered else []
    lines += [_template_of_dim(name, facts.get(name)) for name in ordered]
    lines += ["inputs:"]
    for spec in specs:
        if spec.shape is None:
            lines.append(f"  {yaml_key(spec.name)}: [?]  # one entry per axis; the model does not state how many")
        else:
            lines.append(f"  {yaml_key(spec.name)}: [{', '.join(map(str, names[spec.name]))}]")
    shape_inputs = report.shape_inputs if report is not None else {}
    by_name = {spec.name: spec for spec in specs}
    lines += ["values:"] if shape_inputs else []
    for name, place in shape_inputs.items():
        shape = by_name[name].shape or ()
        count = shape[0] if shape and isinstance(shape[0], int) else 1
        marks = f"[{', '.join(['?'] * count)}]"
        lines.append(f"  {yaml_key(name)}: {{min: {marks}, opt: {marks}, max: {marks}}}  # read by {place}")
    return "\n".join(lines) + "\n"


def _template_of_dim(name: str, fact: DimFact | None) -> str:
    if fact is not None and fact.kind == "fixed":
        return f"  {name}: {fact.suggestion}{_comment(fact)}"
    if fact is not None and fact.kind == "derived":
        return f"  {name}: {{min: ?, opt: ?, max: ?}}{_comment(fact)}"
    if fact is not None and fact.suggestion is not None:
        return f"  {name}: {fact.suggestion}{_comment(fact)}, for example"
    low, high = (1, "?") if fact is None else (fact.low, "?" if fact.high is None else fact.high)
    return f"  {name}: {{min: {low}, opt: ?, max: {high}}}{'' if fact is None else _comment(fact)}"


def _comment(fact: DimFact) -> str:
    """What the graph says of a dim, as the end of a line."""
    if fact.kind == "derived":
        text = f"= {fact.formula}: {fact.reason}"
    elif fact.kind == "fixed":
        text = f"fixed: {fact.reason}"
    elif fact.high is not None or fact.low > 1 or fact.multiple > 1:
        text = f"{fact.limits}: {fact.reason}"
    else:
        text = fact.reason
    return f"  # {' '.join(text.split())}" if text else ""


def profiles_to_yaml(profiles: ProfileSet, specs: Sequence[TensorSpec], report: DimReport | None = None) -> str:
    """The YAML of resolved profiles, as `trtforge profile` prints it; reading it back gives the same ranges."""
    names = dim_names(specs, profiles, report)
    facts = {fact.name: fact for fact in report.dims} if report is not None else {}
    dims, values = [], []
    for profile in profiles.profiles:
        spans = [(dim, profile.inputs[name], axis) for name, own in names.items() for axis, dim in enumerate(own)]
        dims.append({dim: _span_to_yaml(span, axis) for dim, span, axis in spans if isinstance(dim, str)})
        values.append({yaml_key(name): _span_to_yaml(span) for name, span in profile.values.items()})
    shared = {name: value for name, value in values[0].items() if all(name in other for other in values)}
    lines = ["dims:"] if dims[0] else []
    lines += [f"  {name}: {span}{_comment(facts[name]) if name in facts else ''}" for name, span in dims[0].items()]
    lines += ["inputs:"] + [f"  {yaml_key(name)}: [{', '.join(map(str, own))}]" for name, own in names.items()]
    lines += ["values:"] if shared else []
    lines += [f"  {name}: {span}" for name, span in shared.items()]
    if len(dims) > 1 or profiles.first.name != "default":
        lines.append("profiles:")
        for profile, own_dims, own_values in zip(profiles.profiles, dims, values, strict=True):
            parts = [f"name: {yaml_key(profile.name)}"]
            for section, own, base in (("dims", own_dims, dims[0]), ("values", own_values, shared)):
                changed = [f"{name}: {span}" for name, span in own.items() if base.get(name) != span]
                parts += [f"{section}: {{{', '.join(changed)}}}"] if changed else []
            lines.append(f"  - {{{', '.join(parts)}}}")
    return "\n".join(lines) + "\n"


def _span_to_yaml(span: ShapeRange, axis: int | None = None) -> str:
    low, opt, high = (list(sizes) if axis is None else sizes[axis] for sizes in (span.min, span.opt, span.max))
    return f"{{min: {low}, opt: {opt}, max: {high}}}"


def dim_names(
    specs: Sequence[TensorSpec], profiles: ProfileSet | None = None, report: DimReport | None = None
) -> dict[str, list[int | str]]:
    """Every input's dims as a profile file writes them: an integer, or a name made plain and unique where it must be.

    With `profiles`, a name shared by dims whose ranges differ is split, and a dim that cannot vary is an integer. With
    `report`, dims that the graph takes for one have one name.
    """
    result: dict[str, list[int | str]] = {}
    meanings: dict[str, Any] = {}
    for spec in specs:
        spans = [profile.inputs[spec.name] for profile in profiles.profiles] if profiles else []
        shape = spec.shape if spec.shape is not None else (None,) * (len(spans[0].min) if spans else 0)
        dims: list[int | str] = []
        for axis, dim in enumerate(shape):
            sizes = tuple(sizes[axis] for span in spans for sizes in (span.min, span.opt, span.max))
            if isinstance(dim, int) or len(set(sizes)) == 1:
                dims.append(dim if isinstance(dim, int) else sizes[0])
                continue
            fact = report.dim_at(spec.name, axis) if report is not None else None
            label = dim if fact is None else fact.name
            plain = re.sub(r"\W+", "_", label or "").strip("_")
            is_name = plain and not plain[0].isdigit() and plain.lower() not in _YAML_WORDS
            own = re.sub(r"\W+", "_", f"{spec.name}_{axis}").strip("_")
            own = f"dim_{own}" if own[0].isdigit() else own
            meaning = sizes or (label if is_name else (spec.name, axis))
            candidates = itertools.chain([plain] if is_name else [], [own], (f"{own}_{n}" for n in itertools.count(2)))
            dims.append(next(name for name in candidates if meanings.setdefault(name, meaning) == meaning))
        result[spec.name] = dims
    return result


def yaml_key(name: str) -> str:
    """A name as YAML text that reads back as it is."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", name) and name.lower() not in _YAML_WORDS:
        return name
    plain = (c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in name)
    return f'"{"".join(plain)}"'
