"""What each kernel takes of a multiprocessor, from the messages of `ptxas -v`."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trtforge.textfile import FileModel

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for 'sm_(\d+)[a-z]?'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class KernelResources(FileModel):
    """One kernel for one architecture.

    Attributes:
        name: in C++.
        architecture: 86 is sm_86.
        registers: of a thread.
        stack_bytes: of a thread, in local memory.
        spill_store_bytes, spill_load_bytes: registers written to and read from local memory.
        static_shared_bytes: of a block, besides what is asked for at the launch.
    """

    name: str
    architecture: int
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int

    @property
    def spilled_bytes(self) -> int:
        """Written and read again."""
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def shared_bytes(self) -> int:
        """Of a block, with what is asked for at the launch."""
        return self.static_shared_bytes + dynamic_shared_bytes(self.name)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, with `shared_bytes`."""
        return {**self.model_dump(mode="json"), "shared_bytes": self.shared_bytes}


def dynamic_shared_bytes(kernel: str) -> int:
    """The shared memory that a kernel is launched with, from the arguments of its template.

    A GEMM tile has stages of both operands; attention two stages of K and V, their rows padded by 8 elements of 2
    bytes; the persistent kernel the most of all that it runs, which is a GEMM's.
    A test compares this with the sizes of the C++ types.

    Args:
        kernel: its C++ name, or its symbol, which is what a record has where c++filt was missing.
    """
    if tile := re.search(r"GemmTile\D+(\d+)\D+(\d+)\D+(\d+)\D+(\d+)", kernel):
        rows, cols, depth_bytes, stages = map(int, tile.groups())
        return (rows + cols) * depth_bytes * stages
    if "block_kernel" in kernel:
        return 48 * 1024
    if tile := re.search(r"AttentionTile(?:<\w+, |I\w+?Li)(\d+)", kernel):
        head_size = int(tile[1])
        return 2 * 2 * (64 if head_size <= 64 else 32) * (head_size + 8) * 2
    return 0


def resources_from_ptxas(log: str) -> tuple[KernelResources, ...]:
    """Every kernel of a build log, in order of name and architecture."""
    found: dict[tuple[str, int], KernelResources] = {}
    entry: tuple[str, int] | None = None
    function = ""
    stack = (0, 0, 0)
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry, stack = (match[1], int(match[2])), (0, 0, 0)
        elif match := _PROPERTIES.search(line):
            function = match[1]
        elif entry and function == entry[0] and (match := _STACK.search(line)):
            stack = (int(match[1]), int(match[2]), int(match[3]))
        elif entry and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            found[entry] = KernelResources(
                name=entry[0],
                architecture=entry[1],
                registers=int(match[1]),
                stack_bytes=stack[0],
                spill_store_bytes=stack[1],
                spill_load_bytes=stack[2],
                static_shared_bytes=int(shared[1]) if shared else 0,
            )
            entry = None
    readable = readable_names({name for name, _ in found})
    kernels = [kernel.model_copy(update={"name": readable[kernel.name]}) for kernel in found.values()]
    return tuple(sorted(kernels, key=lambda kernel: (kernel.name, kernel.architecture)))


def readable_names(names: Iterable[str]) -> dict[str, str]:
    """The C++ name of each symbol, without namespace and parameters; the symbol itself where c++filt is missing."""
    symbols = sorted(names)
    program = shutil.which("c++filt")
    if program is None or not symbols:
        return {symbol: symbol for symbol in symbols}
    printed = subprocess.run(
        [Path(program)], input="\n".join(symbols), capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    return {symbol: _shorten(name) for symbol, name in zip(symbols, printed, strict=True)}


def _shorten(name: str) -> str:
    """`void ns::kernel<ns::T, (bool)0>(ns::Params)` as `kernel<T, 0>`."""
    without_parameters = re.sub(r"\((?![^()]*\)\d)[^()]*\)$", "", name.removeprefix("void "))
    return re.sub(r"\b\w+::|\((?:bool|int)\)", "", without_parameters)
