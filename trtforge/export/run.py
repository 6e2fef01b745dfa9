"""Export a source to an ONNX file and compare both models; torch runs in a child process.

The child's death - out of memory, a crash in native code - is one error here, and what it left is in the caller's
folder. Nothing is ever fetched from a network.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trtforge.errors import InputError
from trtforge.export.folder import check_folder
from trtforge.export.mark import add_metadata
from trtforge.export.program import check_program
from trtforge.export_info import ExportInfo, ExportRun
from trtforge.hashing import sha256_of_file
from trtforge.isolation import Child, Meta
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.progress import Note
from trtforge.source import source_kind
from trtforge.spec import Precision
from trtforge.traced_dims import KEY, text_from_dims

if TYPE_CHECKING:
    from trtforge.reference import ReferenceModel

# Opset 23 has `Attention` and `RMSNormalization`, which half precision wants whole; in fp32 the builder refuses the
# first unless it is taken apart.
ATTENTION_OPSET, PLAIN_OPSET = 23, 20
OPSETS = range(18, 24)
_SERVICE, _PURPOSE = "trtforge.export.worker:SERVICE", "PyTorch export"
_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",
}


@dataclasses.dataclass(frozen=True, slots=True)
class ExportRequest:
    """What to export, and how.

    Attributes:
        source: a folder, a `.pt2` file, or `package.module:function`.
        opset: of the ONNX file.
        opset_reason: why that one.
        layout: dims of each input by the profile file; None leaves them to the conventions.
        ranges: min, opt and max of named dims by the profile file; examples lie within.
        input_names: inputs that the profile or the data knows; None takes what the model takes.
        trust_remote_code: run the code that a folder brings.
        limits: bounds on untrusted input.
    """

    source: Path
    opset: int
    opset_reason: str
    layout: Mapping[str, tuple[int | str, ...]] | None = None
    ranges: Mapping[str, tuple[int, int, int]] = dataclasses.field(default_factory=dict)
    input_names: tuple[str, ...] | None = None
    trust_remote_code: bool = False
    limits: Limits = DEFAULT_LIMITS


def choose_opset(precision: Precision) -> tuple[int, str]:
    """The opset that suits a precision, and why."""
    if precision.base == "fp32":
        return PLAIN_OPSET, "it has no Attention operator, which TensorRT does not fuse in fp32"
    return ATTENTION_OPSET, f"it keeps Attention and RMSNormalization in one piece for {precision.base}"


def check_opset(opset: int | None) -> None:
    """Refuse an opset that torch does not export to.

    Raises:
        InputError: it is one.
    """
    if opset is not None and opset not in OPSETS:
        raise InputError(
            f"--opset {opset} cannot be used",
            f"it is one of {OPSETS[0]} to {OPSETS[-1]}",
            "leave it out, or choose one",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedSource:
    """A source that was checked.

    Attributes:
        meta: what the child is told of it.
        sha256: hash of all that decides the model in its files; None for a function.
    """

    meta: Meta
    sha256: str | None


def export_model(request: ExportRequest, checked: CheckedSource, output: Path, note: Note) -> ExportInfo:
    """Write the ONNX file, beside it `<name>.data` where the weights are large.

    Args:
        request: see `ExportRequest`.
        checked: its source.
        output: the file; its folder is there and is the caller's.
        note: takes progress.

    Raises:
        InputError: a source that cannot be exported; says what and where.
        UnavailableError: PyTorch is not installed.
        ChildDiedError: the process that exports died.
    """
    from trtforge.reference import ReferenceModel

    caches = {"HF_MODULES_CACHE": "modules", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    env = {**_ENV, **{name: str(output.parent / folder) for name, folder in caches.items()}}
    log = output.parent / "export.log"
    with Child(_SERVICE, purpose=_PURPOSE, log=log, env=env) as child:
        answer, _ = child.call(
            "export",
            {**checked.meta, "output": str(output.absolute()), "opset": request.opset},
            on_progress=lambda progress: note(str(progress.get("phase", ""))),
        )
        with ReferenceModel(output) as reference:
            runs = _compare(child, reference, int(answer["runs"]), note)
            ones = _compare(child, reference, len(answer["ones"]), note, "one")
        for name, run in zip(answer["ones"], ones, strict=True):
            # torch traces with a size of 2 at least; code that asks for 1 took its other way.
            answer["dims"][name]["min"] = answer["dims"][name]["min"] if run.passed else 2
    info = ExportInfo.model_validate(
        {
            "kind": checked.meta["kind"],
            "architecture": answer["architecture"],
            "opset": request.opset,
            "opset_reason": request.opset_reason,
            "exporter": answer["exporter"],
            "source_sha256": checked.sha256,
            "dims": answer["dims"],
            "fixed": answer["fixed"],
            "notes": answer["notes"],
            "runs": runs,
        }
    )
    bounds = text_from_dims(info.dims)
    if bounds is not None:
        add_metadata(output, KEY, bounds)
    return info


def check_source(request: ExportRequest) -> CheckedSource:
    """Check a source without running any of it.

    Raises:
        InputError: a source that cannot be used.
    """
    kind = source_kind(request.source)
    layout = None if request.layout is None else {name: list(dims) for name, dims in request.layout.items()}
    meta: Meta = {"kind": kind, "source": str(request.source), "layout": layout}
    meta["ranges"] = {name: list(span) for name, span in request.ranges.items()}
    if kind == "function":
        return CheckedSource(meta, None)
    if kind == "program":
        check_program(request.source, request.limits)
        return CheckedSource(meta, sha256_of_file(request.source))
    if kind == "onnx":
        if request.source.suffix != ".onnx":
            raise InputError(
                f"{request.source} cannot be exported",
                "it is no folder, no .pt2 file and no module:function",
                "check the path or the name",
            )
        raise InputError(f"{request.source} needs no export", "it is no PyTorch model", "build it as it is")
    found = check_folder(request.source, request.trust_remote_code, request.limits)
    meta |= {
        "folder": os.fspath(found.path.absolute()),
        "architecture": found.architecture,
        "pooling": found.pooling,
        "trust_remote_code": request.trust_remote_code,
        "input_names": None if request.input_names is None else list(request.input_names),
    }
    return CheckedSource(meta, found.sha256)


def _compare(child: Child, reference: ReferenceModel, count: int, note: Note, kind: str = "run") -> list[ExportRun]:
    from trtforge.export.parity import compare_run

    runs = []
    for index in range(count):
        note(f"comparing with torch{' at size 1' if kind == 'one' else ''}, {index + 1} of {count}")
        _, arrays = child.call("run", {"index": index, "kind": kind})
        inputs = {name[3:]: array for name, array in arrays.items() if name.startswith("in:")}
        outputs = {name[4:]: array for name, array in arrays.items() if name.startswith("out:")}
        runs.append(compare_run(reference, inputs, outputs))
    return runs
