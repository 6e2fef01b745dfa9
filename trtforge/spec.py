"""What the user asks a build to do, checked as far as that needs no file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trtforge.engine_options import DEFAULT_OPTIONS, EngineOptions
from trtforge.errors import InputError
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.source import source_name

if TYPE_CHECKING:
    from trtforge.export_info import Exported

FloatType = Literal["fp32", "fp16", "bf16"]
# numpy / ml_dtypes names of the float types.
FLOAT_DTYPES: dict[FloatType, Literal["float32", "float16", "bfloat16"]] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}
Quantization = Literal["int8", "fp8", "int4", "int8-weights"]
# Of the weighted nodes: activations and weights in 8 bits, or weights only.
CALIBRATED: tuple[Quantization, ...] = ("int8", "fp8")
WEIGHT_ONLY: tuple[Quantization, ...] = ("int4", "int8-weights")
# Mean cosine that a build must reach unless --budget says otherwise.
QUANTIZED_BUDGETS: dict[Quantization, float] = {"int8": 0.99, "fp8": 0.99, "int8-weights": 0.99, "int4": 0.97}
FLOAT_BUDGETS: dict[FloatType, float] = {"fp16": 0.999, "bf16": 0.999, "fp32": 0.9999}


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """The types of a build: `Precision("int8", "fp16")` is INT8 with the rest in fp16.

    Attributes:
        quantization: how weighted nodes are quantized; None where they are not.
        base: what everything else runs in, and in weight-only builds the products as well.
    """

    quantization: Quantization | None
    base: FloatType

    @property
    def name(self) -> str:
        """`fp32`, `fp16`, `bf16`, or a quantization such as `int8` (the rest in fp16), `int8+bf16`, `int8+fp32`."""
        if self.quantization is None:
            return self.base
        return self.quantization if self.base == "fp16" else f"{self.quantization}+{self.base}"

    @property
    def is_calibrated(self) -> bool:
        """True when activations are quantized as well, which takes their ranges."""
        return self.quantization in CALIBRATED

    @property
    def is_weight_only(self) -> bool:
        """True when weights are stored in a low format and multiplied in `base`."""
        return self.quantization in WEIGHT_ONLY

    @property
    def default_budget(self) -> float:
        """The mean cosine that a build of this precision has to reach."""
        return FLOAT_BUDGETS[self.base] if self.quantization is None else QUANTIZED_BUDGETS[self.quantization]


def precision_from_options(
    int8: bool = False,
    fp16: bool = False,
    bf16: bool = False,
    fp32: bool = False,
    fp8: bool = False,
    int4: bool = False,
    int8_weights: bool = False,
) -> Precision:
    """The precision that the command line's flags mean; none of them means fp32, the model as it is.

    Raises:
        InputError: more than one quantization, or more than one float type.
    """
    quantizations: dict[Quantization, bool] = {"int8": int8, "fp8": fp8, "int4": int4, "int8-weights": int8_weights}
    bases: dict[FloatType, bool] = {"fp16": fp16, "bf16": bf16, "fp32": fp32}
    quantized = [name for name, given in quantizations.items() if given]
    floats = [name for name, given in bases.items() if given]
    if len(quantized) > 1:
        raise InputError(
            f"--{quantized[0]} and --{quantized[1]} exclude each other",
            "a build stores its weights in one low format",
            "give one of --int8, --fp8, --int4 and --int8-weights",
        )
    if len(floats) > 1:
        raise InputError(
            f"--{floats[0]} and --{floats[1]} exclude each other",
            "what is not quantized runs in one float type",
            "give one of --fp16, --bf16 and --fp32",
        )
    return Precision(quantized[0] if quantized else None, floats[0] if floats else ("fp16" if quantized else "fp32"))


def precision_from_name(name: str) -> Precision:
    """The precision of a `Precision.name`.

    Raises:
        InputError: unknown name.
    """
    choices = [Precision(q, base) for q in (None, *CALIBRATED, *WEIGHT_ONLY) for base in FLOAT_DTYPES]
    known = {precision.name: precision for precision in choices}
    if name not in known:
        raise InputError(f"precision {name!r} is unknown", f"it is one of {', '.join(known)}", "correct it")
    return known[name]


Verification = Literal["auto", "off", "required"]


def verify_from_options(no_verify: bool, require_verify: bool) -> Verification:
    """What `--no-verify` and `--require-verify` mean.

    Raises:
        InputError: both.
    """
    if no_verify and require_verify:
        raise InputError(
            "--no-verify and --require-verify exclude each other", "one skips what the other demands", "give one"
        )
    return "off" if no_verify else ("required" if require_verify else "auto")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildSpec:
    """One build.

    Attributes:
        source: an ONNX file, a `.pt2` program, a Hugging Face folder, or `package.module:function`.
        precision: see `Precision`.
        calib: calibration data (`.npz`, folder, `module:function`) or a calibration table (`.json`);
            None looks for `calibration/<stem>.npz` or `.json`.
        eval: data to verify with; None holds back a fifth of the calibration data.
        profile: a YAML file or a shipped name; None looks for `profiles/<stem>.yaml`, then at the data's shapes.
        recipe: a YAML file or a shipped name; None takes the defaults.
        backend: "auto", "tensorrt" or "tensorrt-rtx".
        gpu: compute capabilities, e.g. "sm_86,sm_89"; None takes the backend's portable default, or for TensorRT the
            GPU of this machine.
        budget: mean cosine to reach, or with a metric its first figure; None takes the precision's default cosine.
        search: where INT8 alone misses the budget, find nodes to leave float so that it is met.
        metric: `module:function(outputs, reference, feeds)` whose figures go into the report.
        verify: "auto" verifies when there is data, "off" never, "required" fails the build without data.
        tf32: let fp32 products use TF32.
        engine_options: how the builder makes the engine.
        output: the artifact's folder; None is `build/<stem>-<precision>`.
        cache: folder of a stage cache; None for none.
        force: replace an artifact made from other inputs.
        limits: bounds on untrusted input.
        trust_remote_code: run the code that a Hugging Face folder brings.
        exported: the ONNX file made of a source that is none; filled in by the job.
    """

    source: Path
    precision: Precision = Precision(None, "fp32")
    calib: str | None = None
    eval: str | None = None
    profile: str | None = None
    recipe: str | None = None
    backend: str = "auto"
    gpu: str | None = None
    budget: float | None = None
    search: bool = True
    metric: str | None = None
    verify: Verification = "auto"
    tf32: bool = True
    engine_options: EngineOptions = DEFAULT_OPTIONS
    output: Path | None = None
    cache: Path | None = None
    force: bool = False
    limits: Limits = DEFAULT_LIMITS
    trust_remote_code: bool = False
    exported: Exported | None = None

    def __post_init__(self) -> None:
        for name in ("calib", "eval", "profile", "recipe", "metric"):
            if getattr(self, name) == "":
                raise InputError(f"--{name} is empty", "it names nothing", "leave the option out, or give it a value")
        if self.budget is not None and not 0.0 <= self.budget <= 1.0:
            raise InputError(f"--budget {self.budget} cannot be used", "it is a cosine", "give a number from 0 to 1")
        for option, value in (("--metric", self.metric), ("--eval", self.eval)):
            if value is not None and self.verify == "off":
                raise InputError(f"{option} and --no-verify exclude each other", "nothing would use it", "give one")

    @property
    def target_directory(self) -> Path:
        """Where the artifact goes."""
        return self.output or Path("build") / f"{source_name(self.source)}-{self.precision.name}"

    @property
    def model_file(self) -> Path:
        """The ONNX file: the source, or what was exported from it."""
        return self.source if self.exported is None else self.exported.path

    @property
    def budget_metric(self) -> str | None:
        """The metric whose first figure has to reach the budget; None where the mean cosine has to."""
        return None if self.budget is None else self.metric

    @property
    def cosine_budget(self) -> float:
        """The mean cosine to reach, or the metric's figure."""
        return self.precision.default_budget if self.budget is None else self.budget
