"""`trtforge profile`: the optimisation profile as YAML."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trtforge.cli import options
from trtforge.cli.render import print_json, progress_reporter

NAME = "profile"


def command(
    source: options.Source,
    data: Annotated[
        str | None, typer.Option("--data", metavar="DATA", help="Samples whose shapes give the ranges.")
    ] = None,
    profile: options.ProfileOption = None,
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Print the profile that a build would use, or the YAML to fill in where ranges are missing."""
    from trtforge.inspection import describe_profile
    from trtforge.limits import DEFAULT_LIMITS

    with progress_reporter():
        found = describe_profile(source, data, profile, DEFAULT_LIMITS.override(limit or ()))
    if as_json:
        print_json(found.to_dict())
        return 0
    sys.stdout.write(found.yaml)
    if found.open_dims:
        sys.stderr.write(
            f"fill in min, opt and max of {', '.join(found.open_dims)} and save it as profiles/{source.stem}.yaml "
            "beside the model\n"
        )
    return 0
