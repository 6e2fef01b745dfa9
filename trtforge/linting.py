"""Lint an ONNX file, and write one that keeps the rules."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from trtforge.artifact import write_model
from trtforge.graph.lint import Finding, Fixed, fix, lint
from trtforge.graph.normalise import TARGET_OPSET, normalise
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.stages import load_source
from trtforge.staging import check_free

# Scales per channel came to Q/DQ with opset 13; a newer opset is kept.
LINT_OPSET = 13


@dataclasses.dataclass(frozen=True, slots=True)
class LintResult:
    """What the linter found and the fixer did.

    Attributes:
        model: the file that was read.
        findings: of that file, in its normal form: local functions inlined, constants folded, names unique.
        fixed: what was done; empty when nothing was to be written.
        remaining: findings of the graph after that.
        output: the file written, or None.
    """

    model: Path
    findings: tuple[Finding, ...]
    fixed: tuple[Fixed, ...]
    remaining: tuple[Finding, ...]
    output: Path | None

    @property
    def passed(self) -> bool:
        """True when no error is left; warnings may be."""
        return all(finding.severity != "error" for finding in self.remaining)

    def outcomes(self) -> list[str | None]:
        """For each finding, what the fixer did about it; None where it is left."""
        left = {(finding.rule, finding.node) for finding in self.remaining}
        by_rule = {(fixed.rule, node): fixed.what for fixed in self.fixed for node in fixed.nodes}
        by_node = {node: fixed.what for fixed in reversed(self.fixed) for node in fixed.nodes}
        places = [(finding.rule, finding.node) for finding in self.findings]
        return [
            None if place in left else by_rule.get(place) or by_node.get(place[1], "mended with another finding")
            for place in places
        ]

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "model": str(self.model),
            "passed": self.passed,
            "findings": [
                {**dataclasses.asdict(finding), "fixed": outcome}
                for finding, outcome in zip(self.findings, self.outcomes(), strict=True)
            ],
            "fixed": [dataclasses.asdict(fixed) for fixed in self.fixed],
            "remaining": [dataclasses.asdict(finding) for finding in self.remaining],
            "output": None if self.output is None else str(self.output),
        }


def lint_model(
    source: Path, output: Path | None = None, force: bool = False, limits: Limits = DEFAULT_LIMITS
) -> LintResult:
    """Look for what a builder would refuse, or accept and get wrong; nothing is run.

    Args:
        source: the ONNX file.
        output: where to write the mended model, in normal form; by default nothing is mended.
        force: an existing output may be replaced.
        limits: bounds on untrusted input.

    Raises:
        InputError: no ONNX file, one that breaks a rule of `graph.load`, or an output that exists.
        UnavailableError: the output cannot be written.
    """
    if output is not None:
        check_free(output, force)
    loaded = load_source(source, limits)
    graph, _ = normalise(loaded.graph, LINT_OPSET, operators="keep")
    findings = tuple(lint(graph, TARGET_OPSET))
    if output is None:
        return LintResult(source, findings, (), findings, None)
    fixed = tuple(fix(graph))
    remaining = tuple(lint(graph, TARGET_OPSET))
    write_model(graph, output, loaded.metadata)
    return LintResult(source, findings, fixed, remaining, output)
