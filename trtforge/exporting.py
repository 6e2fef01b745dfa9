"""The step before a job's first: a source that is not ONNX becomes an ONNX file that lives as long as the job."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from trtforge.progress import Event, Reporter, Stopwatch, ignore
from trtforge.source import source_kind, source_name
from trtforge.spec import BuildSpec

if TYPE_CHECKING:
    from trtforge.cache.store import Entry
    from trtforge.export.run import ExportRequest
    from trtforge.export_info import ExportInfo, ExportRun

# Packages whose version changes what an export gives.
_PACKAGES = ("torch", "onnxscript", "onnx-ir", "transformers", "safetensors")


P = ParamSpec("P")
R = TypeVar("R")


def on_exported(job: Callable[Concatenate[BuildSpec, P], R]) -> Callable[Concatenate[BuildSpec, P], R]:
    """A job, which takes a spec first and may take a `report`, that exports its source before it starts."""
    signature = inspect.signature(job)

    @functools.wraps(job)
    def run(spec: BuildSpec, *args: P.args, **kwargs: P.kwargs) -> R:
        report = signature.bind(spec, *args, **kwargs).arguments.get("report", ignore)
        with exported(spec, report) as ready:
            return job(ready, *args, **kwargs)

    return cast("Callable[Concatenate[BuildSpec, P], R]", run)


@contextlib.contextmanager
def exported(spec: BuildSpec, report: Reporter) -> Iterator[BuildSpec]:
    """The spec, with its source as an ONNX file in `exported` where it is none; the file is gone afterwards.

    Raises:
        TrtForgeError: the source cannot be used or exported.
    """
    if source_kind(spec.source) == "onnx":
        yield spec
        return
    from trtforge.cache.store import open_cache
    from trtforge.export.run import check_source, export_model
    from trtforge.export_info import Exported
    from trtforge.profile_choice import find_profile

    found_profile = find_profile(spec.source) if spec.profile is None else spec.profile
    spec = dataclasses.replace(spec, profile=None if found_profile is None else str(found_profile))
    with tempfile.TemporaryDirectory(prefix="trtforge-") as work:
        path = Path(work) / f"{source_name(spec.source)}.onnx"
        watch = Stopwatch(report)
        with watch.stage("export") as note, open_cache(spec.cache, spec.limits.cache_bytes, report) as cache:
            request = export_request(spec)
            codec, checked = _ExportCodec(path), check_source(request)
            key = None if cache is None else _key(request, path.name, checked.sha256)
            found = cache.find("export", key, codec) if cache is not None and key is not None else None
            if found is None:
                info = export_model(request, checked, path, note)
                if cache is not None and key is not None:
                    cache.store("export", key, info, codec, ())
            else:
                info = found.value
        for event in export_events(info):
            report(event)
        yield dataclasses.replace(spec, exported=Exported(path, info, watch.seconds["export"]))


def export_request(spec: BuildSpec, opset: int | None = None) -> ExportRequest:
    """What a spec means for the export: its precision's opset, and the dims of its profile file."""
    from trtforge.export.run import ExportRequest, choose_opset
    from trtforge.profile_choice import profile_file
    from trtforge.profile_sources import read_profile_file

    chosen, reason = choose_opset(spec.precision)
    if opset is not None:
        chosen, reason = opset, "as asked for"
    path = profile_file(spec.profile, spec.source)
    layout, ranges = None, {}
    if path is not None:
        content = read_profile_file(path, spec.limits)
        fixed = {name: dim for name, dim in content.dims.items() if isinstance(dim, int)}
        ranges = {name: (dim.min, dim.opt, dim.max) for name, dim in content.dims.items() if not isinstance(dim, int)}
        layout = {
            name: tuple(fixed.get(dim, dim) if isinstance(dim, str) else dim for dim in dims)
            for name, dims in content.inputs.items()
        }
    return ExportRequest(
        source=spec.source,
        opset=chosen,
        opset_reason=reason,
        layout=layout or None,
        ranges=ranges,
        input_names=tuple(layout) if layout else _names_in_data(spec),
        trust_remote_code=spec.trust_remote_code,
        limits=spec.limits,
    )


def export_events(info: ExportInfo) -> Iterator[Event]:
    """What the user is told of an export: what fixes a dim, what else is worth knowing, and where the models differ."""
    for entry in info.fixed:
        text = f"dim '{entry.name}' is fixed to {entry.size}: {entry.reason}"
        yield Event("export", text, "warning")
    for text in info.notes:
        yield Event("export", text, "notice")
    first = info.runs[0] if info.runs else None
    for run in info.runs:
        if not run.passed:
            wrong = [name for name, output in run.outputs.items() if not output.passed]
            text = f"the exported model differs from torch on {_shapes(run)}: {run.error or ', '.join(wrong)}"
            if first is not None and first.passed and first.inputs != run.inputs:
                text += (
                    f" (it equals torch on {_shapes(first)}: its code does something else at some sizes, which a trace "
                    "cannot keep)"
                )
            yield Event("export", text, "warning")


def _shapes(run: ExportRun) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in run.inputs.items())


def _names_in_data(spec: BuildSpec) -> tuple[str, ...] | None:
    """Names of the arrays of the data file, which say which optional inputs are wanted; None where none is found."""
    from trtforge.inputs import find_calibration
    from trtforge.npz import NpzFile
    from trtforge.textfile import kind_of

    for given in (spec.calib or find_calibration(spec.source), spec.eval):
        if given is None or str(given).endswith(".json"):
            continue
        path = Path(given)
        files = sorted(path.glob("*.npz"))[:1] if kind_of(path, "data") == "folder" else [path]
        if files and kind_of(files[0], "data") == "file":
            return tuple(NpzFile(files[0], spec.limits).headers)
    return None


def _key(request: ExportRequest, name: str, digest: str | None) -> str | None:
    """The key of an export; None for a function, of which nobody knows when it changes."""
    from trtforge.stage_keys import stage_key

    if digest is None:
        return None
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    layout = {key: list(dims) for key, dims in (request.layout or {}).items()}
    options = [request.opset, layout, request.ranges, request.input_names, request.trust_remote_code]
    return stage_key("export", [name, digest, options, versions])


class _ExportCodec:
    """An exported model in the stage cache: its files, and how it came to be.

    Args:
        path: of the ONNX file; its external data lies beside it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, value: ExportInfo, scratch: Path) -> tuple[Any, dict[str, Path]]:
        """The info as JSON, and the files."""
        del scratch
        files = [self._path, self._path.with_name(f"{self._path.name}.data")]
        return value.model_dump(mode="json"), {file.name: file for file in files if file.exists()}

    def load(self, entry: Entry) -> ExportInfo:
        """Put the files in place, and read the info."""
        from trtforge.export_info import ExportInfo

        info = ExportInfo.model_validate(entry.value)
        for name in entry.record.files:
            entry.fetch(Path(name).name, self._path.with_name(Path(name).name))
        return info


def export(spec: BuildSpec, output: Path, report: Reporter, opset: int | None = None) -> ExportInfo:
    """Export a source to an ONNX file that stays.

    Args:
        spec: source, precision, profile and calibration data count; an existing file is replaced only with `force`.
        output: the file; weights beyond 1 GiB are beside it in `<name>.data`.
        report: takes progress and warnings.
        opset: None takes the one that suits the precision.

    Raises:
        TrtForgeError: the source cannot be used or exported; nothing is left behind.
    """
    from trtforge.export.mark import mark_failed
    from trtforge.export.run import check_opset, check_source, export_model
    from trtforge.staging import check_free, check_not_read, make_parents, translate_write_errors

    check_opset(opset)
    check_not_read(output, (spec.source, spec.calib, spec.profile))
    check_free(output, spec.force)
    watch = Stopwatch(report)
    with watch.stage("export") as note, contextlib.ExitStack() as stack, translate_write_errors(output):
        folder = output.absolute().parent
        make_parents(folder, stack)
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=folder)))
        request = export_request(spec, opset)
        info = export_model(request, check_source(request), work / output.name, note)
        if not info.passed:
            mark_failed(work / output.name)
        # The model last: a reader that sees it finds its weights.
        for name in (f"{output.name}.data", output.name):
            if (work / name).exists():
                (work / name).replace(folder / name)
    for event in export_events(info):
        report(event)
    for name, (low, _, high) in request.ranges.items():
        dim = info.dims.get(name)
        if dim is not None and not dim.covers(low, high):
            text = f"the profile gives dim '{name}' {low} to {high}, and the model was traced for {dim.limits}"
            report(Event("export", text, "warning"))
    return info
