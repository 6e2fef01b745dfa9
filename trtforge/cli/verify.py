"""`trtforge verify`: check an artifact again, on other data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli import options
from trtforge.cli.render import plain, print_json, print_table, progress_reporter

NAME = "verify"


def command(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="A folder that `build` wrote.")],
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="FILE", help="The source model. Default: where the build read it."),
    ] = None,
    eval_data: Annotated[
        str | None, typer.Option("--eval", metavar="DATA", help="Samples to run (.npz, folder, module:function).")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="COSINE", help="Mean cosine to reach. Default: the build's.")
    ] = None,
    metric: options.Metric = None,
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Check an artifact's files, run its graph against the source model, and record the figures in it."""
    from trtforge.acceptance import VerifySpec, verify_artifact
    from trtforge.limits import DEFAULT_LIMITS

    spec = VerifySpec(artifact, model, eval_data, budget, metric, DEFAULT_LIMITS.override(limit or ()))
    with progress_reporter() as report:
        parity = verify_artifact(spec, report)
    if as_json:
        print_json(parity.model_dump(mode="json"))
    else:
        verdict = "passed" if parity.passed else "FAILED"
        sys.stdout.write(
            f"{plain(str(artifact))}: {verdict}; {plain(parity.candidate)} against {plain(parity.reference)}\n"
        )
        rows = [("output", "cosine", "min", "SQNR", "max error")]
        for name, output in parity.outputs.items():
            shown = "-" if output.sqnr_db is None else f"{output.sqnr_db:.1f} dB"
            rows.append(
                (name, f"{output.cosine:.5f}", f"{output.cosine_min:.5f}", shown, f"{output.max_abs_error:.3g}")
            )
        print_table(rows)
        for name, values in parity.metrics.items():
            sys.stdout.write(f"  {plain(name)}: " + ", ".join(f"{k} {v:.4f}" for k, v in values.items()) + "\n")
        sys.stdout.write(f"  budget {parity.budget}, {parity.samples} samples\n")
        if parity.note:
            sys.stdout.write(f"  {plain(parity.note)}\n")
    return 0 if parity.passed else 1
