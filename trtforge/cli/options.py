"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[Path, typer.Argument(metavar="SOURCE", help="The model: an .onnx file.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
LimitOption = Annotated[
    list[str] | None,
    typer.Option("--limit", metavar="NAME=VALUE", help="Raise a bound on untrusted input, e.g. model_nodes=500000."),
]
Calib = Annotated[
    str | None,
    typer.Option(
        metavar="DATA",
        help="Calibration data (.npz, a folder of them, module:function) or a calibration table (.json). "
        "Default: calibration/<model>.npz or .json beside the model or here.",
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Optimisation profiles (YAML). Default: profiles/<model>.yaml, else the data's shapes.",
    ),
]
Recipe = Annotated[
    str | None, typer.Option(metavar="FILE|NAME", help="How to quantize: a YAML file or a shipped recipe.")
]
Metric = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="Your own figure: function(outputs, reference, feeds) -> number."),
]
Fp16 = Annotated[bool, typer.Option("--fp16", help="Run in fp16 (with --int8: what is not INT8; the default then).")]
Bf16 = Annotated[bool, typer.Option("--bf16", help="Run in bf16 (with --int8: what is not INT8).")]
Fp32 = Annotated[bool, typer.Option("--fp32", help="Keep the model's own precision (with --int8: for the rest).")]
