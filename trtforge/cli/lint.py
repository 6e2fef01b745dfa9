"""`trtforge lint`: what a builder would refuse, or accept and get wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import options
from trtforge.cli.render import plain, print_json, print_table

if TYPE_CHECKING:
    from trtforge.linting import LintResult

NAME = "lint"
# Nodes shown of those that share a remark.
_MAX_SHOWN = 10


def command(
    source: Annotated[
        Path | None, typer.Argument(metavar="SOURCE", help="The model: an .onnx file.", show_default=False)
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Write a model that keeps the rules.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="With --fix. Default: build/<model>-fixed.onnx."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    rules: Annotated[bool, typer.Option("--rules", help="List the rules and do nothing else.")] = False,
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Check a model's quantization and operators against TensorRT's rules; --fix mends what it can."""
    from trtforge.errors import InputError

    if rules:
        _print_rules(as_json)
        return 0
    if source is None:
        raise InputError("no model was given", "lint reads an .onnx file", "trtforge lint model.onnx, or lint --rules")
    if output is not None and not fix:
        raise InputError("-o was given without --fix", "lint alone writes nothing", "add --fix, or leave -o out")
    from trtforge.limits import DEFAULT_LIMITS
    from trtforge.linting import lint_model

    path = (output or Path("build") / f"{source.stem}-fixed.onnx") if fix else None
    result = lint_model(source, path, force, DEFAULT_LIMITS.override(limit or ()))
    if as_json:
        print_json(result.to_dict())
    else:
        _print_result(result)
    return 0 if result.passed else 1


def _print_rules(as_json: bool) -> None:
    from trtforge.graph.lint import rule_summaries

    summaries = rule_summaries()
    if as_json:
        print_json(summaries)
    else:
        print_table(list(summaries.items()), indent="")


def _print_result(result: LintResult) -> None:
    _print_findings(result)
    errors = sum(finding.severity == "error" for finding in result.findings)
    counts = f"{errors} errors, {len(result.findings) - errors} warnings"
    if result.output is None:
        sys.stdout.write(f"{plain(str(result.model))}: {counts if result.findings else 'clean'}\n")
        return
    left = sum(finding.severity == "error" for finding in result.remaining)
    sys.stdout.write(
        f"{plain(str(result.output))}: {counts}, {len(result.fixed)} fixes; "
        f"{left} errors and {len(result.remaining) - left} warnings are left\n"
    )


def _print_findings(result: LintResult) -> None:
    """Findings by rule; those that share a reason and a remedy, or what was done about them, have it said once."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for finding, outcome in zip(result.findings, result.outcomes(), strict=True):
        remarks = [f"fixed: {outcome}"] if outcome else [f"why: {finding.why}", f"fix: {finding.fix}"]
        groups.setdefault((finding.severity, finding.rule, *remarks), []).append(finding.what)
    for (severity, rule, *shared), places in groups.items():
        for what in places[:_MAX_SHOWN]:
            sys.stdout.write(f"{severity} {rule}: {plain(what)}\n")
        if len(places) > _MAX_SHOWN:
            sys.stdout.write(f"  ... and {len(places) - _MAX_SHOWN} more (--json shows all)\n")
        for remark in shared:
            sys.stdout.write(f"  {plain(remark)}\n")
