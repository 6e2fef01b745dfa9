"""Find the batching settings that serve most within an objective, by measurement.

objectives = parse_objectives(["p99=50ms"])
spec = TuneSpec(Path("models"), find_triton(default_places()), objectives, output=Path("tuning"))
tune(spec).outcome.best
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trtforge import __version__
from trtforge.errors import InputError
from trtforge.hashing import fingerprint, sha256_of_file
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.loadtest.machine import cpu_name
from trtforge.loadtest.objective import Objective
from trtforge.loadtest.traffic import Loads, Traffic, load_traffic
from trtforge.loadtest.tuning.candidate import (
    PACKAGED,
    Candidate,
    batch_limit,
    candidates,
    diff,
    packaged_sizes,
    with_candidate,
)
from trtforge.loadtest.tuning.live import Bench, TrialRunner
from trtforge.loadtest.tuning.page import render_tuning
from trtforge.loadtest.tuning.plans import LoadKind
from trtforge.loadtest.tuning.records import TrialFile
from trtforge.loadtest.tuning.result import TuneResult
from trtforge.loadtest.tuning.search import REPEATS, Outcome, Search, estimate_s, final_stages_s
from trtforge.progress import Event, Reporter, ignore
from trtforge.report.figures import count
from trtforge.serving.repository import (
    CONFIG_NAME,
    PackagedModel,
    load_repository,
    replace_config,
)
from trtforge.serving.triton.environment import TritonInstall
from trtforge.staging import replace_file
from trtforge.textfile import kind_of, read_text

TRIALS_NAME = "trials.jsonl"
PAGE_NAME = "report.html"
RESULT_NAME = "tune.json"
DELAYS_US = (0, 500, 2000)
INSTANCES = (1, 2)
PREFERRED: tuple[tuple[int, ...] | Literal["packaged"], ...] = ((), PACKAGED)
# Seconds of a short probe: less tells nothing of a tail, more is wasted on candidates that are not chosen.
_LEAST_S, _MOST_S = 1.0, 10.0
# A request that takes longer than this many times the limit has missed it; waiting for more is lost time.
_TIMEOUT_FACTOR, _LEAST_TIMEOUT_S = 4.0, 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class TuneSpec:
    """What to tune.

    Attributes:
        repository: that `trtforge package` wrote.
        install: the server.
        objectives: all must be met.
        output: a folder for the trials, the page and the configurations; one that holds trials is continued.
        model: to tune; None takes the traffic's, or the only one that clients call.
        traffic: a file; None makes requests of batch 1 from the model's metadata, in an open loop.
        delays_us, preferred, instances: to try in every combination; see `Candidate`.
        minutes: that the search may take.
        repeats: of the confirmation; fewer than three do not tell the noise.
        server_cpus, client_cpus: cores; None leaves all.
        apply: write the best settings into the repository.
        limits: bounds on the traffic's files.
    """

    repository: Path
    install: TritonInstall
    objectives: tuple[Objective, ...]
    output: Path
    model: str | None = None
    traffic: Path | None = None
    delays_us: tuple[int, ...] = DELAYS_US
    preferred: tuple[tuple[int, ...] | Literal["packaged"], ...] = PREFERRED
    instances: tuple[int, ...] = INSTANCES
    minutes: float = 10.0
    repeats: int = REPEATS
    server_cpus: tuple[int, ...] | None = None
    client_cpus: tuple[int, ...] | None = None
    apply: bool = False
    limits: Limits = DEFAULT_LIMITS


def tune(spec: TuneSpec, report: Reporter = ignore) -> TuneResult:
    """Search the settings of a repository's model, keep every trial, and write a page.

    Raises:
        InputError: a model without batches, traffic that does not fit, settings or a budget that cannot be used.
        UnavailableError: the server does not start, or the place cannot be written.
    """
    _check_output(spec.output)
    _check_cpus(spec.client_cpus)
    entries = load_repository(spec.repository).models
    traffic = _read_traffic(spec, entries)
    configs = _read_configs(spec, entries, traffic.model)
    front = None if traffic.model in configs else _read_config(spec, traffic.model)
    found = _candidates(spec, configs)
    seconds = _probe_seconds(spec, len(found) - 1)
    bench = Bench(
        install=spec.install,
        repository=spec.repository,
        configs=configs,
        front=front,
        traffic=traffic,
        folder=spec.traffic.parent if spec.traffic is not None else Path(),
        objectives=spec.objectives,
        seconds=seconds,
        server_cpus=spec.server_cpus,
        client_cpus=spec.client_cpus,
        limits=spec.limits,
    )
    conditions = _conditions(bench, found, spec.repeats)
    outcome = _search(spec, bench, found, conditions, report)
    chosen = {}
    if outcome.best is not None and outcome.is_better:
        chosen = {name: with_candidate(text, outcome.best, name) for name, text in configs.items()}
    for name, text in chosen.items():
        replace_file(spec.output / f"{name}.{CONFIG_NAME}", text)
        if spec.apply:
            replace_config(spec.repository, name, text)
    result = TuneResult(
        model=traffic.model,
        objectives=spec.objectives,
        kind=_kind(traffic),
        outcome=outcome,
        configs=chosen,
        diff=diff(configs, chosen, str(spec.repository)) if chosen else "",
        is_applied=spec.apply and bool(chosen),
        conditions=conditions,
    )
    replace_file(spec.output / RESULT_NAME, json.dumps(result.to_dict(), indent=1) + "\n")
    replace_file(spec.output / PAGE_NAME, render_tuning(result))
    return result


def _search(
    spec: TuneSpec, bench: Bench, found: Sequence[Candidate], conditions: dict[str, Any], report: Reporter
) -> Outcome:
    survey_ends = time.monotonic() + 60 * spec.minutes - final_stages_s(len(found) - 1, bench.seconds, spec.repeats)
    with tempfile.TemporaryDirectory(prefix="trtforge-tune-") as work:
        live = TrialRunner(bench, Path(work), lambda text: report(Event("tune", text)))
        trials = TrialFile(spec.output / TRIALS_NAME, conditions, live.run)
        if trials.num_known:
            report(Event("tune", f"continues with {count(trials.num_known, 'trial')} of {spec.output}", "notice"))
        search = Search(
            _kind(bench.traffic), spec.objectives, trials.run, lambda: time.monotonic() < survey_ends, spec.repeats
        )
        return search.find_best(found)


def _check_output(folder: Path) -> None:
    """Refuse a folder that holds something else than a search."""
    if kind_of(folder, "output folder") not in (None, "folder"):
        raise InputError(f"{folder} cannot hold a search", "it is not a folder", "choose another folder with -o")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if names and TRIALS_NAME not in names:
        why = f"it holds {', '.join(sorted(names)[:4])} and no {TRIALS_NAME}"
        raise InputError(f"{folder} is not the folder of a search, so it is not touched", why, "choose another with -o")


def _check_cpus(cpus: Sequence[int] | None) -> None:
    allowed = os.sched_getaffinity(0)
    if cpus is not None and not set(cpus) <= allowed:
        raise InputError(
            f"the client cannot be pinned to cores {', '.join(map(str, cpus))}",
            f"the cores of this process are {', '.join(map(str, sorted(allowed)))}",
            f"name some of them, e.g. {min(allowed)}",
        )


def _kind(traffic: Traffic) -> LoadKind:
    return "open" if traffic.load.rates else "closed"


def _read_traffic(spec: TuneSpec, entries: Sequence[PackagedModel]) -> Traffic:
    """The traffic to tune for, with a model of the repository."""
    called = [entry.name for entry in entries if not any(_is_behind(front, entry) for front in entries)]
    if spec.traffic is None and spec.model is None and len(called) != 1:
        why = f"{spec.repository} has {', '.join(called) or 'none'}"
        raise InputError("it is not clear which model to tune", why, "name one with --model, or give --traffic")
    if spec.traffic is None:
        traffic = Traffic(model=spec.model or called[0], load=Loads(rates=(1.0,)))
    else:
        traffic = load_traffic(spec.traffic, {"model": spec.model} if spec.model else None, spec.limits)
    if len(traffic.batch_steps) > 1:
        why = f"the traffic has {', '.join(map(str, traffic.batch_steps))}, each for a step of its own"
        raise InputError("tuning takes one batch size, or a mix", why, "write batch: 1, or weights: {1: 9, 4: 1}")
    if traffic.model not in [entry.name for entry in entries]:
        why = f"{spec.repository} has {', '.join(called) or 'none'}"
        raise InputError(f"there is no model {traffic.model!r} to tune", why, "name one with --model")
    longest_s = _TIMEOUT_FACTOR * max(objective.limit_ms for objective in spec.objectives) / 1e3
    timeout_s = min(traffic.timeout_s, max(_LEAST_TIMEOUT_S, longest_s))
    return traffic.model_copy(update={"timeout_s": timeout_s})


def _read_configs(spec: TuneSpec, entries: Sequence[PackagedModel], model: str) -> dict[str, str]:
    """The configurations to tune: the model's own, or of a text front those of its buckets."""
    target = next(entry for entry in entries if entry.name == model)
    behind = [entry.name for entry in entries if _is_behind(target, entry)]
    configs = {}
    for name in behind or [model]:
        configs[name] = _read_config(spec, name)
        if batch_limit(configs[name], f"{name}/{CONFIG_NAME}") < 2:
            why = "its max_batch_size is 0 or 1, so the server joins no requests"
            raise InputError(f"there is nothing to tune in {name}", why, "package a model with an open batch dimension")
    return configs


def _read_config(spec: TuneSpec, name: str) -> str:
    return read_text(spec.repository / name / CONFIG_NAME, "model configuration")


def _is_behind(front: PackagedModel, entry: PackagedModel) -> bool:
    """Whether a model is a length bucket of a text front, `<name>_b<length>`."""
    return front.kind == "text" and entry.bucket is not None and entry.name == f"{front.name}_b{entry.bucket}"


def _candidates(spec: TuneSpec, configs: Mapping[str, str]) -> tuple[Candidate, ...]:
    """What to try; "packaged" sizes are left out where no model has any, as they equal none."""
    has_sizes = any(packaged_sizes(text, f"{name}/{CONFIG_NAME}") for name, text in configs.items())
    preferred = [() if sizes == PACKAGED and not has_sizes else sizes for sizes in spec.preferred]
    if min(spec.delays_us, default=-1) < 0 or min(spec.instances, default=0) < 1 or not preferred:
        why = "a delay is 0 us or more, instances are 1 or more, and there must be one of each to try"
        raise InputError("these settings cannot be tried", why, "--delays 0,500 --instances 1 --preferred none")
    return candidates(spec.delays_us, preferred, spec.instances)


def _probe_seconds(spec: TuneSpec, num_candidates: int) -> float:
    """The length of a short probe that the budget allows: a search is linear in it."""
    needed_s = estimate_s(num_candidates, _LEAST_S, spec.repeats)
    if 60 * spec.minutes < needed_s:
        what = f"--budget {spec.minutes:g} is too short for {count(num_candidates, 'configuration')}"
        why = f"they take about {math.ceil(needed_s / 60)} minutes with the shortest probes"
        raise InputError(what, why, "give more minutes, or fewer --delays, --preferred, --instances or --repeat")
    base_s, second_s = (estimate_s(num_candidates, one, spec.repeats) for one in (0.0, 1.0))
    seconds = (60 * spec.minutes - base_s) / (second_s - base_s)
    return round(min(seconds, _MOST_S), 1)


def _conditions(bench: Bench, found: Sequence[Candidate], repeats: int) -> dict[str, Any]:
    """What a search may be continued under, and what its page shows."""
    files = {name: sha256_of_file(bench.folder / name) for name in bench.traffic.files()}
    return {
        "trtforge": __version__,
        "triton": bench.install.version,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "server_cpus": bench.server_cpus and list(bench.server_cpus),
        "client_cpus": bench.client_cpus and list(bench.client_cpus),
        "model": bench.traffic.model,
        "configs_sha256": fingerprint([bench.front, dict(bench.configs)]),
        "traffic": bench.traffic.model_dump(mode="json", exclude_defaults=True),
        "traffic_files": files,
        "objectives": [str(objective) for objective in bench.objectives],
        "candidates": [str(candidate) for candidate in found],
        "probe_s": bench.seconds,
        "repeats": repeats,
    }
