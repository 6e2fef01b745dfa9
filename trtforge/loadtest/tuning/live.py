"""Trials against the real server: a private copy of the repository, and a server of its own for each trial.

The repository itself is not touched. Files of the copy are links to it; only the configurations are written anew.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trtforge.errors import ChildDiedError, UnavailableError
from trtforge.limits import Limits
from trtforge.loadtest.address import Address
from trtforge.loadtest.objective import Objective
from trtforge.loadtest.session import LoadSession
from trtforge.loadtest.traffic import Traffic
from trtforge.loadtest.tuning.candidate import DEFAULT, Candidate, with_candidate, without_batching
from trtforge.loadtest.tuning.plans import Plan
from trtforge.loadtest.tuning.trial import Probe, Stage, Trial, probe_of
from trtforge.serving.repository import CONFIG_NAME
from trtforge.serving.triton.environment import TritonInstall
from trtforge.serving.triton.server import TritonServer
from trtforge.staging import replace_file

# Seconds at a load before it is measured.
_WARMUP_S = 1.0
_LONG_STAGES = ("refine", "confirm")


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """What stays the same over the trials.

    Attributes:
        install: the server's program.
        repository: of the models.
        configs: text of `config.pbtxt` of the models to tune, by name.
        front: text of that of a text front before them; None without one. It stays as packaged; Triton's default has no
            dynamic batching there either.
        traffic: what is sent; its loads and durations are not used.
        folder: where the traffic's paths start.
        objectives: see `Objective`.
        seconds: of a probe; the last two stages take twice as long.
        server_cpus, client_cpus: cores; None leaves all.
        limits: bounds on the traffic's files.
    """

    install: TritonInstall
    repository: Path
    configs: Mapping[str, str]
    front: str | None
    traffic: Traffic
    folder: Path
    objectives: Sequence[Objective]
    seconds: float
    server_cpus: Sequence[int] | None
    client_cpus: Sequence[int] | None
    limits: Limits


class TrialRunner:
    """Makes trials.

    Args:
        bench: what stays the same.
        work: an empty folder for the copy of the repository and the server's log.
        tell: takes what it is at.
    """

    def __init__(self, bench: Bench, work: Path, tell: Callable[[str], None]) -> None:
        self._bench = bench
        self._copy = work / "models"
        self._log = work / "triton.log"
        self._tell = tell
        shutil.copytree(bench.repository, self._copy, copy_function=_link)

    def run(self, stage: Stage, candidate: Candidate, repeat: int, plan: Plan) -> Trial:
        """Start a server with a candidate's configuration and probe it, load after load.

        Raises:
            InputError: the traffic does not fit the model.
            UnavailableError: the server does not start with Triton's default settings.
        """
        bench, started = self._bench, time.monotonic()
        for name, text in bench.configs.items():
            replace_file(self._copy / name / CONFIG_NAME, with_candidate(text, candidate, name))
        if bench.front is not None:
            name = bench.traffic.model
            text = without_batching(bench.front, name) if candidate == DEFAULT else bench.front
            replace_file(self._copy / name / CONFIG_NAME, text)
        self._tell(f"{stage}: {candidate}")
        probes: list[Probe] = []
        failure = None
        try:
            with TritonServer(bench.install, self._copy, log=self._log, cpus=bench.server_cpus) as server:
                server.wait_ready()
                failure = self._probe(server, stage, candidate, repeat, plan, probes)
        except (UnavailableError, ChildDiedError) as err:
            if stage in ("idle", "default") and not probes:
                raise
            failure = f"{err.what}: {err.why}"
        seconds = round(time.monotonic() - started, 3)
        return Trial(
            stage=stage, candidate=candidate, repeat=repeat, probes=tuple(probes), failure=failure, seconds=seconds
        )

    def _probe(
        self, server: TritonServer, stage: Stage, candidate: Candidate, repeat: int, plan: Plan, probes: list[Probe]
    ) -> str | None:
        """Add probes as the plan asks; the reason where they end early."""
        bench = self._bench
        protocol = bench.traffic.protocol
        url = server.http if protocol == "http" else server.grpc
        address = Address(url, protocol, None if bench.front is None else server.metrics)
        seconds = bench.seconds * (2 if stage in _LONG_STAGES else 1)
        objectives = [str(objective) for objective in bench.objectives]
        with LoadSession(
            address,
            bench.traffic,
            bench.folder,
            objectives=objectives,
            cpus=bench.client_cpus,
            limits=bench.limits,
        ) as session:
            while (load := plan(probes)) is not None:
                self._tell(f"{stage}: {candidate}, {load.describe()}")
                result = session.run_step(load, repeat=repeat, duration_s=seconds, warmup_s=_WARMUP_S)
                # A model's process may keep the port of its dead server open: requests then only time out.
                if not server.is_alive():
                    return f"the server died: {server.failure() or _last_line(self._log)}"
                if result.measurement is None or result.failure is not None:
                    return f"the server stopped answering: {result.failure}"
                probes.append(probe_of(result.measurement, load, bench.configs))
        return None


def _last_line(log: Path) -> str:
    """Where the server's log ends, for want of an error in it."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return f"its log ends with {lines[-1][-200:]!r}" if lines else "its log is empty"


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(Path(source).resolve())
