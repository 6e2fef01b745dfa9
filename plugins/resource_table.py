"""What every kernel takes on every target: registers, shared memory, spills, and which tensor core instructions it has.

    python plugins/resource_table.py [--arch 86,90] [--output benchmarks/results/kernel_resources]

Builds the kernels with `trtforge plugin build --kernels` and reads the machine code with cuobjdump and nvdisasm, from
PATH or from the wheels nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm. Writes OUTPUT.json and OUTPUT.md. Exits 1 where
a kernel spills registers, or lacks the tensor core instructions of its element type.

Presence is what counts: the compiler unrolls differently on each architecture, so numbers of instructions say little.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trtforge.plugins.compile import LibraryRequest, architectures_from_option, build_library
from trtforge.plugins.record import FIRST_WITH_BF16, LibraryRecord
from trtforge.plugins.resources import readable_names

ROOT = Path(__file__).resolve().parents[1]
INSTALL = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
# HMMA, IMMA: tensor cores. LDSM: ldmatrix. LDGSTS: cp.async.
_INSTRUCTION = re.compile(r"\b(HMMA|IMMA|LDSM|LDGSTS)\b(\.\d+\.(?:F32\.BF16|F32|S8\.S8))?")
_FUNCTION = re.compile(r"Function : (\S+)")
_TARGET = re.compile(r"^\s*\.target\s+sm_(\d+)")

Instructions = dict[tuple[str, int], set[str]]
Row = dict[str, Any]


def find_disassembler() -> tuple[Path, dict[str, str]]:
    """cuobjdump, and an environment in which it finds nvdisasm: without that it prints no code and does not say so."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations or ()) if spec else ()
    folders = [str(path) for root in roots for path in Path(root).glob("cu1*/bin")]
    path = os.pathsep.join([os.environ.get("PATH", ""), *folders])
    cuobjdump = shutil.which("cuobjdump", path=path)
    if cuobjdump is None or shutil.which("nvdisasm", path=path) is None:
        sys.exit(f"cuobjdump and nvdisasm are needed to read machine code: {INSTALL}")
    return Path(cuobjdump), {**os.environ, "PATH": path}


def instructions_from_sass(lines: Iterable[str]) -> Instructions:
    """By symbol and architecture, the instructions of tensor cores and copies that a kernel has."""
    found: Instructions = {}
    architecture = 0
    kernel: set[str] = set()
    for line in lines:
        if match := _TARGET.match(line):
            architecture = int(match[1])
        elif match := _FUNCTION.search(line):
            kernel = found.setdefault((match[1], architecture), set())
        elif match := _INSTRUCTION.search(line):
            kernel.add(match[1] + (match[2] or ""))
    return found


def read_instructions(library: Path) -> Instructions:
    """The same of a library, by readable name."""
    cuobjdump, environment = find_disassembler()
    command = [cuobjdump, "-sass", library]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        by_symbol = instructions_from_sass(process.stdout)
    if process.returncode != 0 or not by_symbol:
        sys.exit(f"cuobjdump read nothing of {library} (status {process.returncode})")
    names = readable_names({symbol for symbol, _ in by_symbol})
    return {(names[symbol], architecture): found for (symbol, architecture), found in by_symbol.items()}


def needed_instructions(kernel: str, architecture: int) -> set[str]:
    """What the machine code has to hold. Turing has mma shapes of its own, no cp.async, and no bf16 at all."""
    is_turing, is_bf16 = architecture < FIRST_WITH_BF16, "bfloat16" in kernel
    has_floats = kernel.startswith(("gemm_kernel", "attention_kernel", "block_kernel"))
    has_int8 = kernel.startswith("gemm_s8_kernel") or (kernel.startswith("block_kernel") and kernel.endswith("true>"))
    if (is_turing and is_bf16) or not (has_floats or has_int8):
        return set()
    needed = {"LDSM"} if is_turing else {"LDSM", "LDGSTS"}
    if has_floats:
        needed.add("HMMA.1688.F32" if is_turing else "HMMA.16816.F32.BF16" if is_bf16 else "HMMA.16816.F32")
    if has_int8:
        needed.add("IMMA.8816.S8.S8" if is_turing else "IMMA.16832.S8.S8")
    return needed


def find_faults(rows: list[Row]) -> list[str]:
    """Spills, and instructions that are missing."""
    faults = []
    for row in rows:
        place = f"{row['name']} on sm_{row['architecture']}"
        if row["spill_store_bytes"] or row["spill_load_bytes"]:
            faults.append(f"{place} spills registers")
        if missing := needed_instructions(row["name"], row["architecture"]) - set(row["instructions"]):
            faults.append(f"{place} lacks {', '.join(sorted(missing))}")
    return faults


def rows_of(record: LibraryRecord, instructions: Instructions) -> list[Row]:
    """One row a kernel and architecture."""
    return [
        {
            **{key: value for key, value in kernel.to_dict().items() if key != "static_shared_bytes"},
            "instructions": sorted(instructions[kernel.name, kernel.architecture]),
        }
        for kernel in record.kernels
    ]


def markdown_of(rows: list[Row], cuda: str, architectures: tuple[int, ...]) -> str:
    """One line a kernel: registers by architecture, `+n` for n bytes of spills."""
    by_kernel: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_kernel.setdefault(row["name"], {})[row["architecture"]] = row
    lines = [
        f"Registers of a thread by architecture (`+n`: n bytes spilled), as ptxas {cuda} gives them; shared memory of",
        "a block in bytes; tensor core, ldmatrix (LDSM) and cp.async (LDGSTS) instructions that the machine code holds",
        "on any of the architectures. bf16 kernels trap on sm_75, where launchers refuse bf16. Nothing here was timed.",
        "Made by `python plugins/resource_table.py`.",
        "",
        "| kernel | "
        + " | ".join(f"sm_{architecture}" for architecture in architectures)
        + " | shared | instructions |",
        "| --- |" + " ---: |" * (len(architectures) + 1) + " --- |",
    ]
    for name, found in by_kernel.items():
        registers = []
        for architecture in architectures:
            row = found[architecture]
            spilled = row["spill_store_bytes"] + row["spill_load_bytes"]
            registers.append(f"{row['registers']}" + (f"+{spilled}" if spilled else ""))
        shared = f"{next(iter(found.values()))['shared_bytes']:,}"
        held = " ".join(sorted({name for row in found.values() for name in row["instructions"]}))
        lines.append(f"| `{name}` | " + " | ".join([*registers, shared, held]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Build, read, write, and fail where a kernel is not what it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", help="compute capabilities, e.g. 86,90; default: all")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "kernel_resources")
    parser.add_argument("--jobs", type=int, help="compilers that run at once")
    options = parser.parse_args()
    find_disassembler()  # before minutes of compilation
    request = LibraryRequest(
        ROOT / "build" / "resource-table", architectures_from_option(options.arch), kernels_only=True, jobs=options.jobs
    )
    built = build_library(request)
    rows = rows_of(built.record, read_instructions(built.path))
    faults = find_faults(rows)
    document = {"cuda": built.record.cuda, "architectures": request.architectures, "kernels": rows}
    options.output.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(markdown_of(rows, built.record.cuda, request.architectures))
    sys.stdout.write(f"{len(rows)} kernels x architectures, {len(faults)} faults: {options.output}.md\n")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
