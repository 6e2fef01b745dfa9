"""Read results again, and compare a run with an earlier one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from trtforge.benchmark.case import BlockCase, Dtype, Mask
from trtforge.benchmark.implementations import Mode
from trtforge.benchmark.results import PLUGIN, CaseResult, Measurement, RunResult, merge
from trtforge.benchmark.samples import Summary, is_slower
from trtforge.errors import InputError
from trtforge.ops.attention_ffn import Activation, NormOrder
from trtforge.textfile import FileModel, parse_json, read_text, validate

# Of the conditions, what two runs share when their times may be compared.
_SAME = ("card", "num_multiprocessors")
# Sizes are C ints; a time, rate or peak beyond this bound is no measurement, and products of it overflow.
_Count = Annotated[int, pydantic.Field(gt=0, le=2**31 - 1, strict=True)]
_Positive = Annotated[float, pydantic.Field(gt=0, lt=1e15)]


class _Case(FileModel):
    """As `BlockCase`."""

    batch: _Count
    sequence: _Count
    width: _Count
    num_heads: _Count
    inner_width: _Count
    dtype: Dtype
    mask: Mask
    order: NormOrder
    activation: Activation


class _Measurement(FileModel):
    """As `Measurement`."""

    implementation: str
    mode: Mode
    samples_us: tuple[_Positive, ...]
    rms_ratio: float | None
    max_ratio: float | None
    failure: str | None
    is_wrong: bool


class _CaseLine(FileModel):
    """One case with what was measured of it."""

    kind: Literal["case"] = "case"
    case: _Case
    measurements: tuple[_Measurement, ...]


class _Peaks(FileModel):
    """As `Peaks`."""

    fp16_tflops: _Positive
    int8_tops: _Positive | None
    bandwidth_gbps: _Positive
    source: str


class _RunLine(FileModel):
    """The first line."""

    kind: Literal["run"] = "run"
    schema_version: Literal[1]
    conditions: dict[str, Any]


class _Document(FileModel):
    """The one document of `--json`."""

    schema_version: Literal[1]
    conditions: dict[str, Any]
    cases: tuple[_CaseLine, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A measurement of the plugin in two runs.

    Attributes:
        key: of the case.
        implementation, mode: of the measurement.
        before, now: None where there is no time.
        is_regression: slower beyond the noise, wrong now, or no longer computed.
    """

    key: str
    implementation: str
    mode: str
    before: Summary
    now: Summary | None
    is_regression: bool

    @property
    def ratio(self) -> float | None:
        """Time now over time before."""
        return self.now.median_us / self.before.median_us if self.now else None


def read_run(path: Path) -> RunResult:
    """A run from the lines that it saved, or from the document of `--json`.

    Raises:
        InputError: missing, damaged, or no result file.
    """
    text = read_text(path, "result file")
    if '"kind": "run"' not in text.partition("\n")[0]:
        document = validate(_Document, parse_json(text, str(path)), str(path))
        return RunResult(_check_peaks(document.conditions, path), merge(map(_case_result, document.cases)))
    # A last line without its end was cut off.
    lines = [line for line in text.split("\n")[:-1] if line.strip()]
    values = [parse_json(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    if not values:
        raise InputError(f"{path} holds no result", "its first line was cut off", "measure again")
    head = validate(_RunLine, values[0], str(path))
    cases = [
        validate(_CaseLine, value, f"{path}, line {number}")
        for number, value in enumerate(values, 1)
        if isinstance(value, dict) and value.get("kind") == "case"
    ]
    return RunResult(_check_peaks(head.conditions, path), merge(map(_case_result, cases)))


def _check_peaks(conditions: dict[str, Any], path: Path) -> dict[str, Any]:
    """Conditions as they are; of them, peaks are computed with.

    Raises:
        InputError: the peaks are damaged.
    """
    if conditions.get("peaks") is not None:
        validate(_Peaks, conditions["peaks"], f"{path}, peaks")
    return conditions


def compare_runs(now: RunResult, before: RunResult, source: str) -> tuple[Change, ...]:
    """Every time of the plugin in `before` whose case was measured now.

    Args:
        now: this run.
        before: an earlier one, from `source`.
        source: how an error names it.

    Raises:
        InputError: they are of different cards, or have no case in common.
    """
    for key in _SAME:
        if now.conditions.get(key) != before.conditions.get(key):
            raise InputError(
                f"{source} cannot be compared with this run",
                f"its {key} is {before.conditions.get(key)}, here {now.conditions.get(key)}",
                "compare runs of the same card",
            )
    current = {result.case: result for result in now.cases}
    changes = [
        _change(result.case, measured, measured.summary, current[result.case])
        for result in before.cases
        if result.case in current
        for measured in result.measurements
        if measured.implementation.startswith(PLUGIN) and measured.summary is not None
    ]
    if not changes:
        raise InputError(f"{source} has no case of this run", "there is nothing to compare", "measure the same grid")
    return tuple(changes)


def _change(case: BlockCase, measured: Measurement, before: Summary, result: CaseResult) -> Change:
    found = result.find(measured.implementation, measured.mode)
    now = found.summary if found else None
    # Not asked for in this run is no regression; asked for and not timed is one.
    is_regression = found is not None and (now is None or is_slower(now, before))
    return Change(case.key, measured.implementation, measured.mode, before, now, is_regression)


def _case_result(line: _CaseLine) -> CaseResult:
    measurements = (Measurement(**measured.model_dump()) for measured in line.measurements)
    return CaseResult(BlockCase(**line.case.model_dump()), tuple(measurements))
