"""Cases of whole blocks, the runner that puts them through launch_block on the emulator, and the check of the results.

The runner (tests/csrc/block/block_runner.cpp) reads a line per case and a raw file per operand, and writes raw results.
"""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
from block_reference import Array, Operands, Sizes, block_in_float64, input_scales, make_operands
from case_count import count_cases
from emulation_build import TYPES, sanitizer_environment

from trtforge.ops.attention_ffn import ACTIVATIONS, Variant

ROOT = Path(__file__).parents[2]
LAUNCHERS = sorted((ROOT / "plugins" / "csrc" / "launch").glob("*.cu"))
RUNNER = ROOT / "tests" / "csrc" / "block" / "block_runner.cpp"
SOURCES = [RUNNER, *LAUNCHERS]
AUTO, LAUNCHES, PERSISTENT = 0, 1, 2  # BlockStrategy
STRATEGIES = {"launches": LAUNCHES, "persistent": PERSISTENT}


@dataclasses.dataclass(frozen=True)
class Case:
    """One block. settings: further words of the runner's line."""

    variant: Variant
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    type: str = "half"
    strategy: int = LAUNCHES
    settings: tuple[tuple[str, object], ...] = ()

    def words(self, scales: dict[str, float]) -> dict[str, object]:
        sizes, variant = self.sizes, self.variant
        flags = [("causal", variant.is_causal), ("int8", variant.is_int8)]
        return {
            "type": self.type,
            "batch": sizes.batch,
            "sequence": sizes.sequence,
            "width": sizes.width,
            "inner": sizes.inner,
            "num_heads": sizes.num_heads,
            "softmax_scale": sizes.softmax_scale,
            "epsilon": sizes.epsilon,
            "activation": 1 + ACTIVATIONS.index(variant.activation),
            "order": variant.order,
            "strategy": self.strategy,
            **{f"bias{i}": dim for i, dim in enumerate(sizes.bias_dims)},
            **{name: 1 for name, is_set in flags if is_set},
            **scales,
            **dict(self.settings),
        }

    def with_strategy(self, strategy: int) -> Case:
        return dataclasses.replace(self, strategy=strategy)


@dataclasses.dataclass(frozen=True)
class Result:
    """What the runner says of one block."""

    status: int
    workspace_bytes: int
    strategy: int
    text: str
    y: npt.NDArray[np.generic]


Block = tuple[Case, Operands, dict[str, float]]


def prepare(case: Case) -> Block:
    operands = make_operands(case.variant, case.sizes, TYPES[case.type])
    return case, operands, input_scales(case.variant, case.sizes, operands)


def run(program: Path, folder: Path, blocks: list[Block]) -> list[Result]:
    """Run all blocks in one process; a sanitizer's or the emulator's complaint fails the test with its text."""
    lines = []
    for index, (case, operands, scales) in enumerate(blocks):
        for name, value in operands.items():
            (folder / f"{index}.{name}").write_bytes(value.tobytes())
        lines.append(" ".join(f"{key}={value}" for key, value in {"id": index, **case.words(scales)}.items()))
    count_cases(len(blocks))
    done = subprocess.run(
        [program, folder],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=sanitizer_environment(),
    )
    assert done.returncode == 0, done.stderr[:4000]
    results = []
    for (case, operands, _), line in zip(blocks, done.stdout.splitlines(), strict=True):
        index, status, num_bytes, strategy, text = line.split(" ", 4)
        y = np.frombuffer((folder / f"{index}.y").read_bytes(), TYPES[case.type]).reshape(operands["x"].shape)
        results.append(Result(int(status), int(num_bytes), int(strategy), text, y))
    return results


def check(program: Path, folder: Path, cases: list[Case]) -> None:
    """Both strategies compute every case, bit by bit the same, and it is right."""
    check_blocks(program, folder, [prepare(case) for case in cases])


def check_blocks(program: Path, folder: Path, blocks: list[Block]) -> None:
    """The same with operands that a test made."""
    launches = run(program, folder, blocks)
    persistent = run(program, folder, [(case.with_strategy(PERSISTENT), *others) for case, *others in blocks])
    wrong = {}
    for (case, operands, scales), result, other in zip(blocks, launches, persistent, strict=True):
        assert (result.status, result.strategy) == (0, LAUNCHES), (case, result.text)
        assert (other.status, other.strategy) == (0, PERSISTENT), (case, other.text)
        assert result.y.tobytes() == other.y.tobytes(), case
        # The same roundings in another order: within a third of the plain path's error.
        if not (over := _excess(case, operands, scales, result.y)) < 4 / 3:
            wrong[case.variant.op_type, case.sizes, case.type] = over
    assert not wrong, wrong


def _excess(case: Case, operands: Operands, scales: dict[str, float], y: npt.NDArray[np.generic]) -> float:
    """The error against float64, over that of a computation that rounds each step to T."""
    dtype = TYPES[case.type]
    exact = block_in_float64(case.variant, case.sizes, operands, scales)
    plain = block_in_float64(
        case.variant, case.sizes, operands, scales, rounded=lambda values: values.astype(dtype).astype(np.float64)
    )
    return _root_mean_square(y.astype(np.float64) - exact) / _root_mean_square(plain - exact)


def _root_mean_square(values: Array) -> float:
    return float(np.sqrt((values**2).mean()))
