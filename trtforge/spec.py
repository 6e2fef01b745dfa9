"""What the user asks a build to do, checked as far as that needs no file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from trtforge.errors import InputError
from trtforge.limits import DEFAULT_LIMITS, Limits

FloatType = Literal["fp32", "fp16", "bf16"]
# numpy / ml_dtypes names of the float types.
FLOAT_DTYPES: dict[FloatType, Literal["float32", "float16", "bfloat16"]] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}
# Mean cosine that a build must reach unless --budget says otherwise (INT8 and below, half precision, full precision).
DEFAULT_BUDGETS = {"int8": 0.97, "fp16": 0.999, "bf16": 0.999, "fp32": 0.9999}


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """The types of a build: `Precision(int8=True, base="fp16")` is INT8 with the rest in fp16.

    Attributes:
        int8: weighted nodes get Q/DQ.
        base: what everything else runs in.
    """

    int8: bool
    base: FloatType

    @property
    def name(self) -> str:
        """`fp32`, `fp16`, `bf16`, `int8` (the rest in fp16), `int8+bf16` or `int8+fp32`."""
        if not self.int8:
            return self.base
        return "int8" if self.base == "fp16" else f"int8+{self.base}"

    @property
    def default_budget(self) -> float:
        """The mean cosine that a build of this precision has to reach."""
        return DEFAULT_BUDGETS["int8" if self.int8 else self.base]


def precision_from_options(int8: bool, fp16: bool, bf16: bool, fp32: bool) -> Precision:
    """The precision that the command line's flags mean; none of them means fp32, the model as it is.

    Raises:
        InputError: more than one float type.
    """
    flags: dict[FloatType, bool] = {"fp16": fp16, "bf16": bf16, "fp32": fp32}
    chosen = [name for name, given in flags.items() if given]
    if len(chosen) > 1:
        raise InputError(
            f"--{chosen[0]} and --{chosen[1]} exclude each other",
            "what is not INT8 runs in one float type",
            "give one of --fp16, --bf16 and --fp32",
        )
    return Precision(int8, chosen[0] if chosen else ("fp16" if int8 else "fp32"))


def precision_from_name(name: str) -> Precision:
    """The precision of a `Precision.name`.

    Raises:
        InputError: unknown name.
    """
    known = {p.name: p for p in (Precision(int8, base) for int8 in (False, True) for base in FLOAT_DTYPES)}
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
        source: the ONNX file.
        precision: see `Precision`.
        calib: calibration data (`.npz`, folder, `module:function`) or a calibration table (`.json`);
            None looks for `calibration/<stem>.npz` or `.json`.
        eval: data to verify with; None holds back a fifth of the calibration data.
        profile: a YAML file or a shipped name; None looks for `profiles/<stem>.yaml`, then at the data's shapes.
        recipe: a YAML file or a shipped name; None takes the defaults.
        backend: "auto", "tensorrt" or "tensorrt-rtx".
        gpu: compute capabilities, e.g. "sm_86,sm_89"; None takes the backend's portable default.
        budget: mean cosine to reach; None takes the precision's default.
        metric: `module:function(outputs, reference, feeds)` whose figures go into the report.
        verify: "auto" verifies when there is data, "off" never, "required" fails the build without data.
        tf32: let fp32 products use TF32.
        output: the artifact's folder; None is `build/<stem>-<precision>`.
        force: replace an artifact made from other inputs.
        limits: bounds on untrusted input.
    """

    source: Path
    precision: Precision = Precision(int8=False, base="fp32")
    calib: str | None = None
    eval: str | None = None
    profile: str | None = None
    recipe: str | None = None
    backend: str = "auto"
    gpu: str | None = None
    budget: float | None = None
    metric: str | None = None
    verify: Verification = "auto"
    tf32: bool = True
    output: Path | None = None
    force: bool = False
    limits: Limits = DEFAULT_LIMITS

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
        return self.output or Path("build") / f"{self.source.stem}-{self.precision.name}"

    @property
    def cosine_budget(self) -> float:
        """The mean cosine to reach."""
        return self.precision.default_budget if self.budget is None else self.budget
