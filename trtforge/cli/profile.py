"""`trtforge profile`: the optimisation profiles as YAML."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli import options
from trtforge.cli.render import plain, print_json, progress_reporter

NAME = "profile"


def command(
    source: options.Source,
    data: Annotated[
        str | None, typer.Option("--data", metavar="DATA", help="Samples whose shapes give the ranges.")
    ] = None,
    profile: options.ProfileOption = None,
    buckets: Annotated[
        int | None,
        typer.Option(metavar="N", help="Make N profiles by length, those that waste the least work on padding."),
    ] = None,
    prefill_decode: Annotated[
        bool, typer.Option("--prefill-decode", help="Make the two profiles of a decoder with a cache.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the YAML here, not to stdout.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file.")] = False,
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Print the profiles that a build would use, checked against the model, or the YAML to fill in."""
    from trtforge.exporting import exported
    from trtforge.limits import DEFAULT_LIMITS
    from trtforge.profiling import describe_profile
    from trtforge.source import source_name
    from trtforge.spec import BuildSpec
    from trtforge.staging import check_free, check_not_read, write_text

    if output is not None:
        check_not_read(output, (source, data, profile))
        check_free(output, force)
    limits = DEFAULT_LIMITS.override(limit or ())
    spec = BuildSpec(source=source, calib=data, profile=profile, limits=limits)
    with progress_reporter() as report, exported(spec, report) as ready:
        found = describe_profile(
            ready.model_file,
            data,
            # Data that is given wins over a file that only the conventions name, which an export has looked up.
            profile if data is not None else ready.profile,
            limits,
            buckets=buckets,
            prefill_decode=prefill_decode,
        )
    if output is not None:
        write_text(output, found.yaml, force)
    if as_json:
        print_json(found.to_dict())
        return 0
    sys.stdout.write(found.yaml if output is None else f"{plain(str(output))}\n")
    for note in found.notes:
        sys.stderr.write(f"note: {plain(note)}\n")
    if found.buckets is not None:
        sys.stderr.write(f"{found.buckets.describe()}\n")
    if found.open_dims:
        place = output or f"profiles/{source_name(source)}.yaml beside the model"
        sys.stderr.write(f"fill in the ? of {', '.join(map(plain, found.open_dims))} and save it as {place}\n")
    return 0
