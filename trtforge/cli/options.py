"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="The model: an .onnx file, a .pt2 program, a Hugging Face folder, or module:function.",
        show_default=False,
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code that a Hugging Face folder brings.")
]
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
Backend = Annotated[str, typer.Option(metavar="NAME", help="auto, tensorrt or tensorrt-rtx.")]
Gpu = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Compute capabilities, e.g. sm_86,sm_89. Default: portable; with tensorrt, the GPU that is here.",
    ),
]
Tf32 = Annotated[bool, typer.Option("--tf32/--no-tf32", help="Let fp32 products use TF32.")]
Cache = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Keep the results of the stages in this folder, and take from it what is known already."
    ),
]
Recipe = Annotated[
    str | None, typer.Option(metavar="FILE|NAME", help="How to quantize: a YAML file or a shipped recipe.")
]
Budget = Annotated[
    float | None,
    typer.Option(
        metavar="VALUE",
        help="What must be reached: the mean cosine of every output, or with --metric its first figure. Nodes stay "
        "float where that takes it.",
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="Your own figure: function(outputs, reference, feeds) -> number."),
]
Fp16 = Annotated[bool, typer.Option("--fp16", help="Run in fp16; when quantizing: what is not, which is the default.")]
Bf16 = Annotated[bool, typer.Option("--bf16", help="Run in bf16; when quantizing: what is not.")]
Fp32 = Annotated[bool, typer.Option("--fp32", help="Keep the model's own precision; when quantizing: for the rest.")]
Int8 = Annotated[bool, typer.Option("--int8", help="Quantize weighted nodes to INT8, per channel.")]
Fp8 = Annotated[bool, typer.Option("--fp8", help="Quantize weighted nodes to FP8 (E4M3), for sm_89 and newer.")]
Int4 = Annotated[
    bool, typer.Option("--int4", help="Store weights in INT4, in blocks of 128; they are multiplied in the float type.")
]
Int8Weights = Annotated[
    bool,
    typer.Option("--int8-weights", help="Store weights in INT8, per channel; they are multiplied in the float type."),
]
TritonEnv = Annotated[
    Path | None,
    typer.Option(
        "--triton-env",
        metavar="DIR",
        envvar="TRTFORGE_TRITON",
        help="The Triton server: an environment of `trtforge triton install`, or NVIDIA's /opt/tritonserver. Default: "
        "beside this Python, then ~/.cache/trtforge/triton, then `tritonserver` on PATH.",
    ),
]
