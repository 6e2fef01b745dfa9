"""plugins/resource_table.py: what is read from machine code, and which kernels are faulted."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from emulation_build import KERNELS, REPOSITORY, build_host_program
from plugin_library import build_for_tests

from trtforge.plugins.compile import ARCHITECTURES
from trtforge.plugins.resources import dynamic_shared_bytes

RESULTS = REPOSITORY / "benchmarks" / "results" / "kernel_resources"


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("resource_table", REPOSITORY / "plugins" / "resource_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SASS = """
\tcode for sm_75
\t.target\tsm_75
\t\tFunction : one
        /*0090*/    HMMA.1688.F32 R4, R14, R17, R4 ;    /* 0x0 */
\tcode for sm_90
\t.target\tsm_90a
\t\tFunction : one
        /*0090*/    HMMA.16816.F32.BF16 R4, R14, R17, R4 ;    /* 0x0 */
        /*00a0*/    LDSM.16.MT88.4 R4, [R14] ;
        /*00b0*/    LDGSTS.E.BYPASS.128 [R5], [R2.64] ;
\t\tFunction : two
        /*0090*/    IMMA.16832.S8.S8 R4, R14.ROW, R17.COL, R4 ;
        /*00a0*/    MOV R1, c[0x0][0x28] ;
"""


def test_instructions_are_read_by_kernel_and_architecture(table: ModuleType) -> None:
    assert table.instructions_from_sass(SASS.splitlines()) == {
        ("one", 75): {"HMMA.1688.F32"},
        ("one", 90): {"HMMA.16816.F32.BF16", "LDSM", "LDGSTS"},
        ("two", 90): {"IMMA.16832.S8.S8"},
    }


def row(name: str, architecture: int, instructions: str, spills: int = 0) -> dict[str, Any]:
    return {
        "name": name,
        "architecture": architecture,
        "spill_store_bytes": spills,
        "spill_load_bytes": 0,
        "instructions": instructions.split(),
    }


GEMM, GEMM_S8 = "gemm_kernel<__half, GemmTile<32, 64, 128, 4> >", "gemm_s8_kernel<__half, GemmTile<32, 64, 128, 4> >"
BLOCK, BLOCK_S8 = (f"block_kernel<AttentionTile<__nv_bfloat16, 64>, {is_int8}>" for is_int8 in ("false", "true"))


def test_kernels_as_they_should_be_have_no_fault(table: ModuleType) -> None:
    rows = [
        row(GEMM, 75, "HMMA.1688.F32 LDSM"),
        row(GEMM, 86, "HMMA.16816.F32 LDSM LDGSTS"),
        row(GEMM_S8, 75, "IMMA.8816.S8.S8 LDSM"),
        row(BLOCK, 75, ""),
        row(BLOCK, 86, "HMMA.16816.F32.BF16 LDSM LDGSTS"),
        row(BLOCK_S8, 86, "HMMA.16816.F32.BF16 IMMA.16832.S8.S8 LDSM LDGSTS"),
        row("layernorm_kernel<__half>", 86, ""),
    ]
    assert table.find_faults(rows) == []


@pytest.mark.parametrize(
    ("faulty", "text"),
    [
        (row(GEMM, 86, "LDSM LDGSTS"), "lacks HMMA.16816.F32"),
        (row(GEMM, 75, "HMMA.16816.F32 LDSM"), "lacks HMMA.1688.F32"),
        (row(GEMM, 86, "HMMA.16816.F32 LDSM"), "lacks LDGSTS"),
        (row(GEMM_S8, 86, "HMMA.16816.F32 LDSM LDGSTS"), "lacks IMMA.16832.S8.S8"),
        (row(BLOCK_S8, 86, "HMMA.16816.F32.BF16 LDSM LDGSTS"), "lacks IMMA.16832.S8.S8"),
        (row(BLOCK, 86, "HMMA.16816.F32 LDSM LDGSTS"), "lacks HMMA.16816.F32.BF16"),
        (row("layernorm_kernel<__half>", 86, "", spills=8), "spills registers"),
    ],
)
def test_a_spill_or_a_missing_instruction_is_a_fault(table: ModuleType, faulty: dict[str, Any], text: str) -> None:
    (fault,) = table.find_faults([faulty])
    assert fault == f"{faulty['name']} on sm_{faulty['architecture']} {text}"


def test_shared_memory_is_what_launches_ask_for(tmp_path: Path) -> None:
    names = {
        "gemm_kernel<__half, GemmTile<32, 64, 128, 4> >": "GemmShared<SmallTile>",
        "gemm_s8_kernel<__half, GemmTile<64, 64, 128, 3> >": "GemmShared<MediumTile>",
        "gemm_kernel<__nv_bfloat16, GemmTile<128, 128, 64, 3> >": "GemmShared<LargeTile>",
        **{
            f"attention_kernel<AttentionTile<__half, {size}>, false>": f"AttentionTile<half, {size}>::Shared"
            for size in (32, 64, 80, 96, 128)
        },
        "block_kernel<AttentionTile<__half, 64>, true>": "BlockShared<AttentionTile<half, 64>>",
    }
    source = tmp_path / "sizes.cpp"
    prints = "".join(f'std::printf("%zu\\n", sizeof({type}));' for type in names.values())
    source.write_text(
        f'#include <cstdio>\n#include "{KERNELS}/kernels/block.cuh"\n'
        f"int main() {{ using namespace trtforge; {prints} }}\n"
    )
    printed = subprocess.run([build_host_program([source])], capture_output=True, text=True, check=True).stdout
    assert [dynamic_shared_bytes(name) for name in names] == [int(line) for line in printed.split()]


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_ZN8trtforge11gemm_kernelI13__nv_bfloat16NS_8GemmTileILi32ELi64ELi128ELi4EEEEEvNS_10GemmParamsE", GEMM),
        (
            "_ZN8trtforge16attention_kernelINS_13AttentionTileI13__nv_bfloat16Li96EEELb0EEEvNS_15AttentionParamsE",
            "attention_kernel<AttentionTile<__nv_bfloat16, 96>, false>",
        ),
        ("_ZN8trtforge12block_kernelINS_13AttentionTileI13__nv_bfloat16Li64EEELb1EEEvNS_9BlockPlanE", BLOCK_S8),
        ("_ZN8trtforge16layernorm_kernelI6__halfEEvNS_15LayerNormParamsE", "layernorm_kernel<__half>"),
    ],
)
def test_shared_memory_is_also_known_by_the_symbol(symbol: str, name: str) -> None:
    assert dynamic_shared_bytes(symbol) == dynamic_shared_bytes(name)


def test_the_committed_table_is_of_the_kernels_that_there_are(table: ModuleType) -> None:
    document = json.loads(RESULTS.with_suffix(".json").read_text())
    rows = document["kernels"]
    assert tuple(document["architectures"]) == ARCHITECTURES
    assert table.find_faults(rows) == []
    names = {kernel.name for kernel in build_for_tests(None).record.kernels}
    assert {(row["name"], row["architecture"]) for row in rows} == {(n, a) for n in names for a in ARCHITECTURES}
    assert RESULTS.with_suffix(".md").read_text() == table.markdown_of(rows, document["cuda"], ARCHITECTURES)
