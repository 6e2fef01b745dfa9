"""The options of `build` that say how the builder makes the engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trtforge.engine_options import EngineOptions

_PANEL = "Engine (tensorrt only, save --optimization-level and --workspace)"

Plugin = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="LIB",
        help="Load a plugin library, which is your own code; repeatable.",
        rich_help_panel=_PANEL,
    ),
]
Refit = Annotated[
    bool, typer.Option("--refit", help="An engine whose weights can be replaced.", rich_help_panel=_PANEL)
]
StripWeights = Annotated[
    bool,
    typer.Option(
        "--strip-weights", help="Leave the weights out; refit the engine before it runs.", rich_help_panel=_PANEL
    ),
]
VersionCompatible = Annotated[
    bool, typer.Option("--version-compatible", help="Later releases can load the engine.", rich_help_panel=_PANEL)
]
HardwareCompatible = Annotated[
    str,
    typer.Option(
        "--hardware-compatible",
        metavar="LEVEL",
        help="GPUs that can load the engine: none but this model, ampere_plus or same_compute_capability.",
        rich_help_panel=_PANEL,
    ),
]
OptimizationLevel = Annotated[
    int | None,
    typer.Option(
        "--optimization-level", metavar="0..5", help="5 searches longest for fast kernels.", rich_help_panel=_PANEL
    ),
]
Workspace = Annotated[
    str | None,
    typer.Option(
        "--workspace", metavar="SIZE", help="Most GPU memory for scratch data, e.g. 2GiB.", rich_help_panel=_PANEL
    ),
]
TimingCache = Annotated[
    Path | None,
    typer.Option(
        "--timing-cache",
        metavar="FILE",
        help="Kernel times to reuse; made and kept up to date.",
        rich_help_panel=_PANEL,
    ),
]


def engine_options(
    plugin: list[Path] | None,
    refit: bool,
    strip_weights: bool,
    version_compatible: bool,
    hardware_compatible: str,
    optimization_level: int | None,
    workspace: str | None,
    timing_cache: Path | None,
) -> EngineOptions:
    """The options of the command line, checked.

    Raises:
        InputError: a value that no builder knows.
    """
    from trtforge.engine_options import EngineOptions, hardware_compatibility, size_from_text

    return EngineOptions(
        plugins=tuple(plugin or ()),
        refit=refit,
        strip_weights=strip_weights,
        version_compatible=version_compatible,
        hardware_compatible=hardware_compatibility(hardware_compatible),
        optimization_level=optimization_level,
        workspace=None if workspace is None else size_from_text(workspace),
        timing_cache=timing_cache,
    )
