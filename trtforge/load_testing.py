"""The job of `trtforge loadtest`: run every step of a traffic file, and put what was measured into one run."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from trtforge import __version__
from trtforge.errors import InputError, TrtForgeError
from trtforge.hashing import fingerprint, sha256_of_file
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.loadtest.address import Address, parse_address
from trtforge.loadtest.compare import Comparison, check_comparable, compare_runs
from trtforge.loadtest.folder import check_folder, check_room, write_folder
from trtforge.loadtest.machine import cpu_name
from trtforge.loadtest.objective import parse_objectives
from trtforge.loadtest.results import Environment, ModelUnderTest, Run, ServerInfo, load_run
from trtforge.loadtest.session import LoadSession
from trtforge.loadtest.steps import STAGE, planned_steps, run_steps
from trtforge.loadtest.traffic import Traffic, load_traffic
from trtforge.progress import Event, Reporter, ignore
from trtforge.textfile import kind_of


@dataclasses.dataclass(frozen=True, slots=True)
class LoadTest:
    """What to test.

    Attributes:
        url: of the server, see `address.parse_address`.
        traffic: the traffic file.
        protocol: None takes the URL's, then the traffic's.
        changes: values that take the place of the traffic file's.
        metrics: URL of the server's Prometheus metrics.
        objectives: e.g. "p99=50ms".
        baseline: an earlier run to compare with.
        output: the folder to write; None writes none.
        force: a run may be replaced.
        limits: bounds on the files.
    """

    url: str
    traffic: Path
    protocol: Literal["http", "grpc"] | None = None
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    metrics: str | None = None
    objectives: Sequence[str] = ()
    baseline: Path | None = None
    output: Path | None = None
    force: bool = False
    limits: Limits = DEFAULT_LIMITS


@dataclasses.dataclass(frozen=True, slots=True)
class LoadTestResult:
    """What came of it.

    Attributes:
        run: what was measured.
        comparison: with the baseline; None without one, or where the run ended early.
        unwritten: why the folder was not written, although it could have been before the test; None where it was.
    """

    run: Run
    comparison: Comparison | None
    unwritten: str | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the command exits with 1: the run ended early, answers were wrong or missing, or figures got worse."""
        found = [] if self.run.failure is None else [self.run.failure]
        for step in self.run.steps:
            wrong = sum(
                error.count for one in step.measurements for error in one.errors if error.kind == "wrong answer"
            )
            if wrong:
                found.append(f"{step.key}: {wrong} wrong answers")
            elif not any(one.ok for one in step.measurements):
                found.append(f"{step.key}: no right answer at all")
        if self.comparison is not None:
            found += [f"worse than the baseline: {change.name}" for change in self.comparison.regressions]
        if self.unwritten is not None:
            found.append(self.unwritten)
        return tuple(found)


def run_load_test(test: LoadTest, report: Reporter = ignore) -> LoadTestResult:
    """Run a load test and write its folder.

    Raises:
        InputError: the traffic, the options or the baseline cannot be used; nothing was sent then, but for one request
            of each kind.
        UnavailableError: no server there, the extra `serving` is missing, or the folder cannot be written.
        RequestError: the server did not answer what was asked about the model.
    """
    traffic = load_traffic(test.traffic, test.changes, test.limits)
    address = parse_address(test.url, test.protocol or _scheme_protocol(test.url) or traffic.protocol, test.metrics)
    traffic = traffic.model_copy(update={"protocol": address.protocol})
    objectives = tuple(str(objective) for objective in parse_objectives(test.objectives))
    before = None if test.baseline is None else _load_baseline(test.baseline)
    if test.output is not None:
        check_folder(test.output, test.force)
        check_room(test.output)
    folder = test.traffic.absolute().parent
    files = _hash_files(traffic, folder)
    with LoadSession(address, traffic, folder, objectives=objectives, limits=test.limits) as session:
        for name in session.unranged:
            detail = f"input {name!r} gets the values 0 and 1: the traffic file gives it no min and max"
            report(Event(STAGE, detail, "notice"))
        empty = _describe(session, address, traffic, files, objectives)
        if before is not None:
            check_comparable(empty, before, str(test.baseline))
            _check_common(traffic, before, str(test.baseline))
        steps, failure = run_steps(session, traffic, report)
        server = empty.server.model_copy(update={"gpus": session.gpus()})
    run = empty.model_copy(update={"server": server, "failure": failure, "steps": steps})
    # Of a run that ended early nothing is compared: its last step is not what its name says.
    comparison = None if before is None or failure is not None else compare_runs(run, before, str(test.baseline))
    unwritten = None
    if test.output is not None:
        try:
            write_folder(test.output, run, comparison, test.force)
        except TrtForgeError as err:
            # What was measured is not thrown away: the caller still has it.
            unwritten = f"{err.what}: {err.why}"
    return LoadTestResult(run, comparison, unwritten)


def _hash_files(traffic: Traffic, folder: Path) -> dict[str, str]:
    """SHA-256 of the files that the traffic names."""
    names = sorted(set(traffic.files()))
    for name in names:
        if kind_of(folder / name, "file") != "file":
            what = f"{folder / name} of the traffic file cannot be read"
            raise InputError(what, "there is no such file", "correct the path; it starts at the traffic file's folder")
    return {name: sha256_of_file(folder / name) for name in names}


def _load_baseline(path: Path) -> Run:
    run = load_run(path)
    if run.failure is not None:
        raise InputError(f"baseline {path} ended early", run.failure, "take a run that is complete")
    return run


def _check_common(traffic: Traffic, before: Run, source: str) -> None:
    """Refuse a baseline of other loads before the test rather than after it."""
    planned, known = planned_steps(traffic), {step.key for step in before.steps}
    if not known.intersection(planned):
        why = f"it has {', '.join(sorted(known))}; this run will have {', '.join(planned)}"
        raise InputError(f"baseline {source} has no step of this run", why, "test the same loads and batch sizes")


def _describe(
    session: LoadSession, address: Address, traffic: Traffic, files: dict[str, str], objectives: tuple[str, ...]
) -> Run:
    """The run before its first step."""
    signature = session.signature
    config = None if signature.config is None else dict(signature.config)
    return Run(
        environment=Environment(
            trtforge=__version__,
            python=platform.python_version(),
            locust=importlib.metadata.version("locust"),
            tritonclient=importlib.metadata.version("tritonclient"),
            client_cpu=cpu_name(),
            client_cores=len(os.sched_getaffinity(0)),
            started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        ),
        server=ServerInfo(
            url=address.url,
            name=str(session.server.get("name", "")),
            version=str(session.server.get("version", "")),
            is_local=address.is_local,
            gpus=session.gpus(),
        ),
        model=ModelUnderTest(
            name=signature.name,
            version=traffic.version,
            platform=signature.platform,
            is_decoupled=signature.is_decoupled,
            config=config,
            config_sha256=None if config is None else fingerprint(config),
            artifact_sha256=_artifact_of(config or {}),
        ),
        protocol=address.protocol,
        traffic=traffic,
        files=files,
        traffic_sha256=traffic.request_fingerprint(files),
        objectives=objectives,
        repeats=traffic.repeats,
        failure=None,
        steps=(),
    )


def _artifact_of(config: dict[str, Any]) -> str | None:
    """What `trtforge package` writes into a configuration."""
    parameter = (config.get("parameters") or {}).get("artifact_sha256") or {}
    return parameter.get("string_value")


def _scheme_protocol(url: str) -> Literal["http", "grpc"] | None:
    return "grpc" if url.startswith("grpc://") else "http" if url.startswith("http://") else None
