"""The quantizers that are compared, each as a command that reads an fp32 file and writes a quantized one.

trtforge runs in this interpreter. The peers run in virtual environments of their own, since their dependencies
exclude trtforge's; `set_up_peers` makes those. Without them ONNX Runtime's quantizer still runs here.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).parent / "peers"
TRTFORGE = (sys.executable, "-c", "from trtforge.cli.app import main; main()")
# What pip installs in each environment, in this order. torch first and by itself: the build without CUDA is enough.
REQUIREMENTS = {
    "onnxruntime": ("onnxruntime==1.32.0 onnx==1.23.2",),
    "modelopt": ("torch==2.13.0", "nvidia-modelopt[onnx]==0.47.0"),
}
# Whose versions are noted: what quantizes, and what runs the model for it.
PACKAGES = {"onnxruntime": ("onnxruntime",), "modelopt": ("nvidia-modelopt", "onnxruntime-gpu", "torch")}
READ_VERSIONS = "import sys, json, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
NEEDS_SETUP = "not run: it needs an environment of its own, give --setup DIR"


@dataclass(frozen=True, slots=True)
class Files:
    """What a quantizer is given, and the file to write."""

    model: Path
    calib: Path
    profile: Path
    out: Path


@dataclass(frozen=True, slots=True)
class Quantizer:
    """One row of the table.

    Attributes:
        title: for the table.
        environment: of a peer, a key of `REQUIREMENTS`; None for trtforge.
        arguments: a peer's script under `peers/` and its last arguments, or trtforge's command and options.
        is_table: it writes a calibration table, not a model, so there is nothing to score.
    """

    title: str
    environment: str | None
    arguments: tuple[str, ...]
    is_table: bool = False

    def make_command(self, files: Files, python: str) -> list[str]:
        """Return the command to run, with `python` as a peer's interpreter."""
        if self.environment is None:
            command, *options = self.arguments
            data = ["--calib", str(files.calib), "--profile", str(files.profile)]
            return [*TRTFORGE, command, str(files.model), *data, "--output", str(files.out), "--force", *options]
        script, *options = self.arguments
        return [python, str(PEERS / script), str(files.model), str(files.calib), str(files.out), *options]


def list_quantizers(variants: Sequence[str]) -> dict[str, Quantizer]:
    """Return all quantizers by their short name, in the order of the table.

    Args:
        variants: options of `trtforge quantize`, each a row more, such as "--recipe minilm".
    """
    found = {
        "trtforge": Quantizer("trtforge", None, ("quantize",)),
        "trtforge-calibrate": Quantizer("trtforge, calibration only", None, ("calibrate",), is_table=True),
    }
    for variant in variants:
        found[f"trtforge {variant}"] = Quantizer(f"trtforge {variant}", None, ("quantize", *shlex.split(variant)))
    for method in ("max", "entropy"):
        found[f"modelopt-{method}"] = Quantizer(f"ModelOpt, {method}", "modelopt", ("modelopt_int8.py", method))
    for weights in ("per_channel", "per_tensor"):
        for method in ("minmax", "entropy", "percentile"):
            found[f"onnxruntime-{method}-{weights}"] = Quantizer(
                f"ONNX Runtime, {method}, {weights.replace('_', ' ')}",
                "onnxruntime",
                ("onnxruntime_static.py", method, weights),
            )
    return found


def locate_python(environment: str, folder: Path) -> Path:
    """Return the interpreter of a peer's virtual environment under `folder`."""
    return folder / environment / "bin" / "python"


def set_up_peers(environments: Sequence[str], folder: Path) -> None:
    """Make the virtual environments that are not there yet; the packages come from pip's configured index."""
    for environment in environments:
        # Written last, so that an interrupted installation or another version's is done again.
        stamp = folder / environment / "requirements.json"
        wanted = json.dumps(REQUIREMENTS[environment])
        if stamp.exists() and stamp.read_text() == wanted:
            continue
        subprocess.run([sys.executable, "-m", "venv", str(folder / environment)], check=True)
        for requirement in REQUIREMENTS[environment]:
            python = str(locate_python(environment, folder))
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, *requirement.split()], check=True)
        stamp.write_text(wanted)


def read_versions(environment: str, python: str) -> dict[str, str]:
    """Return the versions of the packages that matter in a peer's environment."""
    command = [python, "-c", READ_VERSIONS, *PACKAGES[environment]]
    versions: dict[str, str] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return versions


def find_python(environment: str | None, setup: Path | None) -> str | None:
    """Return the interpreter of a peer, or of trtforge (None); None where there is none without set-up."""
    if environment is None:
        return sys.executable
    if setup is not None:
        return str(locate_python(environment, setup))
    return sys.executable if environment == "onnxruntime" else None
