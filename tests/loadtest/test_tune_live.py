"""Tuning against the real Triton server, with a model that takes 20 ms for a batch of any size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from command_checks import Watch
from tune_cases import BATCHED, Formula

from trtforge.cli.app import run
from trtforge.errors import InputError, TrtForgeError
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.loadtest.objective import Objective
from trtforge.loadtest.traffic import Traffic
from trtforge.loadtest.tune import TuneSpec, tune
from trtforge.loadtest.tuning.candidate import DEFAULT, Candidate
from trtforge.loadtest.tuning.live import Bench, TrialRunner
from trtforge.loadtest.tuning.plans import LoadKind, load_of
from trtforge.loadtest.tuning.search import Search
from trtforge.loadtest.tuning.trial import Probe, Trial
from trtforge.progress import Event
from trtforge.serving.model_config import DynamicBatching, InstanceGroup, ModelConfig, TensorConfig
from trtforge.serving.repository import (
    ModelFolder,
    PackagedModel,
    damaged_models,
    load_repository,
    write_models,
)
from trtforge.serving.triton.environment import TritonInstall

CODE = b"""
import time

import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.02)
        return [
            pb.InferenceResponse([pb.Tensor("y", pb.get_input_tensor_by_name(request, "x").as_numpy())])
            for request in requests
        ]
"""
OBJECTIVES = (Objective("p99", 500.0),)
TRAFFIC = "model: steady\nload: {users: [1]}\ndistinct: 8\n"
USERS = load_of("closed", 6)


def steady(name: str = "steady", max_batch_size: int = 8, **changes: object) -> ModelFolder:
    entry = PackagedModel(
        name=name,
        kind="onnxruntime",
        model=name,
        model_sha256="0" * 64,
        artifact_sha256="0" * 64,
        precision="fp32",
        targets=(),
        max_batch_size=max_batch_size,
    )
    batching = DynamicBatching((4,), 100) if max_batch_size else None
    dims = (4,) if max_batch_size else (1, 4)
    config = ModelConfig(
        name=name,
        backend="python",
        max_batch_size=max_batch_size,
        inputs=(TensorConfig("x", "float32", dims),),
        outputs=(TensorConfig("y", "float32", dims),),
        instances=(InstanceGroup("KIND_CPU"),),
        dynamic_batching=batching,
    )
    return ModelFolder(entry.model_copy(update=changes), config, {"1/model.py": CODE})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_models(tmp_path / "repo", [steady()], force=False)
    (tmp_path / "traffic.yaml").write_text(TRAFFIC)
    return tmp_path / "repo"


def spec_of(repository: Path, install: TritonInstall, **changes: object) -> TuneSpec:
    values: dict[str, object] = {
        "repository": repository,
        "install": install,
        "objectives": OBJECTIVES,
        "output": repository.parent / "tuning",
        "traffic": repository.parent / "traffic.yaml",
        "delays_us": (0,),
        "preferred": ((),),
        "instances": (1,),
        "minutes": 3.4,
    }
    return TuneSpec(**{**values, **changes})  # type: ignore[arg-type]


def begin(spec: TuneSpec, num_missing: int, kind: LoadKind = "closed") -> list[Trial]:
    """A search that was interrupted: its trials, but for the last ones, are those of a formula."""

    def interrupt(_: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(spec, interrupt)
    limits = Formula({DEFAULT: 50.0, BATCHED: 300.0}, idle_ms={DEFAULT: 20.0, BATCHED: 20.0})
    trials = Search(kind, OBJECTIVES, limits.run, lambda: True).find_best((BATCHED,)).trials
    lines = [json.dumps({"kind": "trial", "trial": trial.model_dump(mode="json")}) for trial in trials]
    with (spec.output / "trials.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in lines[: len(lines) - num_missing])
    return list(trials)


def runner(repository: Path, install: TritonInstall, work: Path) -> TrialRunner:
    bench = Bench(
        install=install,
        repository=repository,
        configs={"steady": (repository / "steady/config.pbtxt").read_text()},
        front=None,
        traffic=Traffic(model="steady", distinct=8, timeout_s=2),
        folder=work,
        objectives=OBJECTIVES,
        seconds=1.0,
        server_cpus=None,
        client_cpus=None,
        limits=DEFAULT_LIMITS,
    )
    (work / "trials").mkdir()
    return TrialRunner(bench, work / "trials", lambda _: None)


def servers() -> list[psutil.Process]:
    """Triton servers that this process started."""
    return [child for child in psutil.Process().children(recursive=True) if child.name() == "tritonserver"]


def test_each_trial_runs_its_own_settings(repository: Path, triton_install: TritonInstall, tmp_path: Path) -> None:
    before = (repository / "steady/config.pbtxt").read_text()
    trials = runner(repository, triton_install, tmp_path)

    def plan(probes: Sequence[Probe]):
        return None if probes else USERS

    default, batched = (trials.run("survey", candidate, 1, plan) for candidate in (DEFAULT, BATCHED))
    assert default.failure is batched.failure is None
    (alone,), (together,) = default.probes, batched.probes
    assert alone.mean_batch == 1.0
    # Six users wait while 20 ms pass: several of them are in the next batch.
    assert together.mean_batch is not None
    assert together.mean_batch > 2
    assert alone.error_share == together.error_share == 0
    assert alone.queue_ms is not None
    assert alone.requests > 0
    assert servers() == []
    assert (repository / "steady/config.pbtxt").read_text() == before
    assert damaged_models(repository, load_repository(repository)) == []


def test_server_that_is_killed_or_refuses_its_settings_is_a_failed_trial(
    repository: Path, triton_install: TritonInstall, tmp_path: Path
) -> None:
    trials = runner(repository, triton_install, tmp_path)

    def kill(probes: Sequence[Probe]):
        for server in servers() if probes else ():
            server.kill()
        return USERS if len(probes) < 2 else None

    killed = trials.run("survey", BATCHED, 1, kill)
    assert len(killed.probes) == 1
    assert killed.failure is not None
    assert killed.failure.startswith("the server died: its log ends with")
    refused = trials.run("survey", Candidate(delay_us=0, preferred=(-1,)), 1, kill)
    assert refused.probes == ()
    assert refused.failure is not None
    assert "preferred" in refused.failure
    with pytest.raises(TrtForgeError):
        trials.run("default", Candidate(delay_us=0, preferred=(-1,)), 1, kill)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_command_finishes_an_interrupted_search(
    repository: Path, triton_install: TritonInstall, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(repository, triton_install)
    expected = begin(spec, num_missing=1)
    monkeypatch.setenv("TRTFORGE_TRITON", str(triton_install.root))
    before = (repository / "steady/config.pbtxt").read_text()
    command = ["loadtest", "tune", str(repository), "--slo", "p99=500ms", "--traffic", str(spec.traffic)]
    command += ["--delays", "0", "--preferred", "none", "--instances", "1", "--budget", "3.4"]
    with monkeypatch.context() as patch:
        patch.setattr("trtforge.loadtest.tune.tune", interrupt)
        assert run([*command, "-o", str(spec.output)]) == 130
    assert watch.capsys.readouterr().err == (
        f"interrupted; run the same command again to go on from {spec.output / 'trials.jsonl'}\n"
    )
    code = run([*command, "-o", str(spec.output), "--json"])
    value = json.loads(watch.capsys.readouterr().out)
    assert code == 0
    trials = [Trial.model_validate(trial) for trial in value["trials"]]
    assert [trial.key for trial in trials] == [trial.key for trial in expected]
    assert trials[:-1] == expected[:-1]
    assert trials[-1].failure is None
    assert any(one.mean_batch is not None and one.mean_batch > 2 for one in trials[-1].probes)
    assert len(value["gains"]["throughput"]["best"]) == 3
    assert {path.name for path in spec.output.iterdir()} >= {"trials.jsonl", "tune.json", "report.html"}
    assert json.loads((spec.output / "tune.json").read_text()) == value
    assert (repository / "steady/config.pbtxt").read_text() == before
    assert servers() == []


def test_best_settings_are_shown_and_written_only_when_asked(
    repository: Path, triton_install: TritonInstall, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(repository, triton_install)
    begin(spec, num_missing=0)
    monkeypatch.setenv("TRTFORGE_TRITON", str(triton_install.root))
    path = repository / "steady/config.pbtxt"
    before = path.read_text()
    command = ["loadtest", "tune", str(repository), "--slo", "p99=500ms", "--traffic", str(spec.traffic)]
    command += ["--delays", "0", "--preferred", "none", "--instances", "1", "--budget", "3.4", "-o", str(spec.output)]
    assert run(command) == 0
    out = watch.capsys.readouterr().out
    assert "BETTER: delay 0 us, preferred none, 1 instance" in out
    assert "-  preferred_batch_size: 4" in out
    assert "write it with --apply" in out
    assert path.read_text() == before
    assert run([*command, "--apply"]) == 0
    assert "written into the repository" in watch.capsys.readouterr().out
    assert path.read_text() == (spec.output / "steady.config.pbtxt").read_text() != before
    assert damaged_models(repository, load_repository(repository)) == []


def test_of_a_text_front_the_buckets_are_tuned(tmp_path: Path, triton_install: TritonInstall) -> None:
    buckets = [steady(f"words_b{length}", bucket=length) for length in (16, 32)]
    write_models(tmp_path / "repo", [steady("words", kind="text"), *buckets, steady("other", bucket=16)], force=False)
    spec = spec_of(tmp_path / "repo", triton_install, traffic=None, model="words", apply=True)
    begin(spec, num_missing=0, kind="open")
    front = (tmp_path / "repo/words/config.pbtxt").read_text()
    result = tune(spec)
    assert set(result.configs) == {"words_b16", "words_b32"}
    assert (tmp_path / "repo/words/config.pbtxt").read_text() == front
    assert (tmp_path / "repo/words_b32/config.pbtxt").read_text() == result.configs["words_b32"]


def test_traffic_that_does_not_fit_ends_the_search(repository: Path, triton_install: TritonInstall) -> None:
    spec = spec_of(repository, triton_install)
    assert spec.traffic is not None
    spec.traffic.write_text(TRAFFIC + "inputs: {z: {min: 0, max: 1}}\n")
    with pytest.raises(InputError) as caught:
        tune(spec)
    assert "z" in str(caught.value)
    assert servers() == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"minutes": 0.5}, "--budget 0.5 is too short for 1 configuration"),
        ({"model": "other"}, "there is no model 'other' to tune"),
        ({"delays_us": (-1,)}, "these settings cannot be tried"),
        ({"instances": (0,)}, "these settings cannot be tried"),
        ({"client_cpus": (4096,)}, "the client cannot be pinned to cores 4096"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_before_anything_starts(
    repository: Path, triton_install: TritonInstall, changes: dict[str, object], what: str
) -> None:
    with pytest.raises(InputError) as caught:
        tune(spec_of(repository, triton_install, **changes))
    assert caught.value.what == what
    assert not (repository.parent / "tuning").exists()


def test_model_without_batches_has_nothing_to_tune(repository: Path, triton_install: TritonInstall) -> None:
    write_models(repository, [steady("alone", max_batch_size=0)], force=False)
    with pytest.raises(InputError, match="nothing to tune in alone"):
        tune(spec_of(repository, triton_install, traffic=None, model="alone"))
    with pytest.raises(InputError, match="not clear which model") as caught:
        tune(spec_of(repository, triton_install, traffic=None))
    assert "alone, steady" in caught.value.why


def test_limits_hold_for_the_traffic_file(repository: Path, triton_install: TritonInstall) -> None:
    with pytest.raises(InputError, match=r"traffic .* is too large"):
        tune(spec_of(repository, triton_install, limits=Limits(text_bytes=8)))


def test_several_batch_sizes_in_turn_are_refused(repository: Path, triton_install: TritonInstall) -> None:
    (repository.parent / "traffic.yaml").write_text(TRAFFIC + "batch: [1, 4]\n")
    with pytest.raises(InputError, match="one batch size, or a mix"):
        tune(spec_of(repository, triton_install))


def test_folder_of_something_else_is_not_touched(repository: Path, triton_install: TritonInstall) -> None:
    output = repository.parent / "tuning"
    output.mkdir()
    (output / "report.html").write_text("mine")
    with pytest.raises(InputError, match="not the folder of a search"):
        tune(spec_of(repository, triton_install))
    assert (output / "report.html").read_text() == "mine"


@pytest.mark.parametrize("option", [["--delays", "0.5"], ["--instances", "two"], ["--server-cpus", "0-1"]])
def test_lists_that_are_no_whole_numbers_are_refused(
    repository: Path, triton_install: TritonInstall, watch: Watch, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    monkeypatch.setenv("TRTFORGE_TRITON", str(triton_install.root))
    assert run(["loadtest", "tune", str(repository), "--slo", "p99=50ms", *option]) == 2
    assert f"{option[0]} '{option[1]}' cannot be used" in watch.capsys.readouterr().err
