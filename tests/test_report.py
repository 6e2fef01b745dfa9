from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from trtforge.manifest import (
    BackendInfo,
    BatchParity,
    CalibrationInfo,
    FileInfo,
    FusionEntry,
    IoInfo,
    KeptFloatEntry,
    Manifest,
    ModelInfo,
    NearMissEntry,
    NodeError,
    ParityInfo,
    PlanInfo,
    PlanLayerEntry,
    PlanTensor,
    PrecisionInfo,
    ProfileInfo,
    RangeInfo,
)
from trtforge.parity import OutputParity
from trtforge.quantization.table import CalibrationTable, TensorRange
from trtforge.report import figures, render_report

IN_ONNX_RUNTIME = "the built graph in ONNX Runtime"
ON_GPU = "the engine on a GPU"
SHA = "0123456789abcdef" * 4
# Sections by anchor, in the order of the page.
SECTIONS = [
    "accuracy",
    "precision",
    "calibration",
    "interface",
    "fusion",
    "plan",
    "files",
    "lint",
    "provenance",
]


class Page(HTMLParser):
    """A page as a browser reads it; fails when a tag is closed that is not the open one."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open_tags: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.cells: list[list[str]] = []
        self.text = ""
        self.script = ""
        self.feed(text)
        self.close()
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag not in ("meta", "input", "br"):
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_tags and self.open_tags[-1] == "script":
            self.script += data
        elif self.open_tags and self.open_tags[-1] != "style":
            self.text += data
            if "td" in self.open_tags or "th" in self.open_tags:
                self.cells[-1][-1] += data

    def values(self, name: str) -> list[str | None]:
        return [value for key, value in self.attributes if key == name]

    def row(self, first: str) -> list[str]:
        return next(row for row in self.cells if row and row[0] == first)


def figures_of(cosine: float, nan: bool = False, sqnr_db: float | None = 22.4) -> OutputParity:
    return OutputParity(cosine=cosine, cosine_min=round(cosine - 0.01, 6), sqnr_db=sqnr_db, max_abs_error=0.8, nan=nan)


def passed(cosine: float = 0.9974, candidate: str = IN_ONNX_RUNTIME, **changes: object) -> ParityInfo:
    outputs = {"logits": figures_of(cosine)}
    parity = ParityInfo(
        reference="the source model in fp32",
        candidate=candidate,
        verified=True,
        passed=True,
        budget=0.97,
        samples=360,
        data_sha256=SHA,
        outputs=outputs,
        batches=(
            BatchParity(batch=8, samples=360, outputs=outputs),
            BatchParity(batch=1, samples=16, outputs={"logits": figures_of(cosine)}),
        ),
        before_qdq={"logits": figures_of(0.9999, sqnr_db=52.3)},
        metrics={"top1": {"fp32": 0.9861, "before_qdq": 0.9861, "candidate": 0.9833}},
    )
    return parity.model_copy(update=changes)


def not_verified() -> ParityInfo:
    return ParityInfo(
        reference="none",
        candidate=IN_ONNX_RUNTIME,
        verified=False,
        passed=None,
        budget=0.97,
        note="No evaluation data was given.",
    )


def bare_manifest(**changes: object) -> Manifest:
    """Nothing but what every artifact has."""
    manifest = Manifest(
        trtforge_version="0.1.0",
        inputs_sha256=SHA,
        model=ModelInfo(name="vit", sha256=SHA),
        backend=BackendInfo(name="tensorrt-rtx", version="1.7.1"),
        targets=("sm_86",),
        precision=PrecisionInfo(
            requested="fp32", nodes={}, gemm_flops_fraction={}, attention_flops_fraction={}, kept_float=()
        ),
        fusion=(),
        near_misses=(),
        plan=PlanInfo(kernels=0, gemm={}, fused_attention=0, layers=()),
        profiles=(),
        io=(),
        calibration=None,
        parity=not_verified(),
        files={},
        timings_s={},
        environment={},
    )
    return manifest.model_copy(update=changes)


def full_manifest(**changes: object) -> Manifest:
    layer = PlanLayerEntry(
        name="qkv_myl0_2",
        type="gemm",
        inputs=(
            PlanTensor(name="x_q", dtype="Int8", shape=(-1, 384)),
            PlanTensor(name="w", dtype="int8", shape=(384, 1152)),
            PlanTensor(name="alpha", dtype="fp32", shape=(1,)),
            PlanTensor(name="scales", dtype="fp32", shape=(1, 1152)),
        ),
        outputs=(PlanTensor(name="y", dtype="Half", shape=(-1, 1152)),),
        onnx_nodes=("/block.0/qkv/MatMul",),
    )
    kept = [KeptFloatEntry(node=f"/block.{i}/qk/MatMul", reason="attention products stay float") for i in range(12)]
    manifest = bare_manifest(
        targets=("sm_86", "sm_120"),
        precision=PrecisionInfo(
            requested="int8",
            nodes={"int8": 48, "fp16": 1, "bf16": 0, "fp32": 0},
            gemm_flops_fraction={"int8": 0.98431, "fp16": 0.01569},
            attention_flops_fraction={"fp16": 1.0},
            kept_float=(*kept, KeptFloatEntry(node="/head/Gemm", reason="N is 10; an INT8 tile needs 16")),
        ),
        fusion=(FusionEntry(region="/block.0/qk/MatMul", pattern="attention", lowered_to="Attention-23"),),
        near_misses=(NearMissEntry(pattern="conv_silu", node="/stem/Conv", reason="two consumers"),),
        plan=PlanInfo(kernels=77, gemm={"int8": 24, "fp16": 0}, fused_attention=6, layers=(layer,)),
        profiles=(
            ProfileInfo(
                name="default",
                inputs={"pixels": RangeInfo(min=(1, 3), opt=(8, 3), max=(32, 3))},
                values={"rate": RangeInfo(min=(16000,), opt=(16000,), max=(16000,))},
            ),
        ),
        io=(IoInfo(name="pixels", mode="input", dtype="float32", shape=("batch", None, 3)),),
        calibration=CalibrationInfo(method="percentile", samples=512, sha256=SHA, amax={"late": 2.0, "early": 4.0}),
        parity=passed(),
        lint=({"rule": "fp32-scale", "node": "/stem/Conv", "message": "the scale is fp32"},),
        warnings=("calibration and evaluation share 3 samples",),
        files={
            "model.engine": FileInfo(sha256=SHA, bytes=5_120_000),
            "model.onnx": FileInfo(sha256=SHA, bytes=7_400_000),
        },
        timings_s={"calibrate": 3.0, "build": 1.0},
        environment={"packages": {"onnxruntime": "1.32.0"}, "tf32": True},
    )
    return manifest.model_copy(update=changes)


def full_table(**tensors: TensorRange) -> CalibrationTable:
    known = {
        "early": TensorRange(amax=4.0, min=-3.5, max=4.5, rms=1.0),
        "late": TensorRange(amax=2.0, min=-2.0, max=2.0, rms=0.11, non_finite=7),
    }
    return CalibrationTable(
        method="percentile",
        percentile=99.99,
        samples=512,
        model_sha256=SHA,
        data_sha256=SHA,
        recipe_sha256=SHA,
        tensors={**known, **tensors},
    )


def full_page(**changes: object) -> Page:
    return Page(render_report(full_manifest(**changes), full_table()))


def test_passed_says_that_the_graph_and_not_the_engine_was_run() -> None:
    page = full_page()
    assert "PASSED" in page.text
    assert "What was run: the built graph in ONNX Runtime, not the engine." in page.text
    assert "the engine itself has not been run" in page.text


def test_engine_run_on_a_gpu_is_said_and_nothing_about_the_graph() -> None:
    page = full_page(parity=passed(candidate=ON_GPU))
    assert "What was run: the engine on a GPU." in page.text
    assert "has not been run" not in page.text


def test_failed_names_the_outputs_that_miss_the_budget_and_the_worst_nodes() -> None:
    outputs = {"logits": figures_of(0.969996), "boxes": figures_of(0.99, nan=True), "mask": figures_of(0.98)}
    parity = passed(
        passed=False,
        outputs=outputs,
        batches=(BatchParity(batch=8, samples=360, outputs=outputs),),
        worst_nodes=(NodeError(node="/block.3/fc2/MatMul", sqnr_db=4.1), NodeError(node="/block.4/Add", sqnr_db=None)),
    )
    page = full_page(parity=parity)
    assert "FAILED" in page.text
    assert "PASSED" not in page.text
    assert "Output logits has a mean cosine of 0.96999 at batch 8." in page.text
    assert "Output boxes has NaN or Inf at batch 8." in page.text
    assert "Output mask" not in page.text
    assert [row[-1] for row in page.cells if row[0] in outputs and len(row) == 8] == ["missed", "NaN or Inf", "met"]
    assert page.row("/block.3/fc2/MatMul")[1] == "4.1 dB"
    assert page.row("/block.4/Add")[1] == "not finite"


def test_of_many_outputs_that_miss_three_are_named_and_the_others_counted() -> None:
    outputs = {f"out{i}": figures_of(0.9) for i in range(5)}
    page = full_page(parity=passed(passed=False, outputs=outputs, batches=()))
    assert "Output out2 has" in page.text
    assert "Output out3 has" not in page.text
    assert "2 more outputs miss it." in page.text


def test_unverified_build_says_so_and_has_no_accuracy_section() -> None:
    page = full_page(parity=not_verified())
    assert "NOT VERIFIED" in page.text
    assert "No output was compared (No evaluation data was given), so its accuracy is not known." in page.text
    assert "accuracy" not in page.values("id")
    assert "PASSED" not in page.text
    assert "What was run" not in page.text


def test_compared_but_not_judged_is_not_verified() -> None:
    assert "NOT VERIFIED" in full_page(parity=passed(passed=None)).text


def test_full_manifest_has_every_section_in_order_and_a_link_to_each() -> None:
    page = full_page()
    assert page.values("id") == SECTIONS
    assert page.values("href") == [f"#{anchor}" for anchor in SECTIONS]


def test_sections_without_data_are_absent() -> None:
    page = Page(render_report(bare_manifest(), None))
    assert page.values("id") == ["provenance"]
    assert page.values("href") == ["#provenance"]
    assert "svg" not in page.tags
    assert "aside" not in page.tags


def test_blocks_without_data_are_absent() -> None:
    page = full_page(parity=passed(metrics={}, before_qdq={}), near_misses=(), timings_s={}, environment={})
    for title in ("Task metrics", "What each step costs", "Worst nodes", "Near misses", "Build time", "Environment"):
        assert title not in page.text
    assert "Rewritten regions" in page.text


HOSTILE = "a</code></title></style><script>alert(1)</script>\n\"'&\u202eb\x00\ud800"
SHOWN = "a</code></title></style><script>alert(1)</script>\\n\"'&\\u202eb\\x00\\ud800"


def test_hostile_names_are_text_everywhere() -> None:
    bounds = RangeInfo(min=(1,), opt=(1,), max=(1,))
    tensor = PlanTensor(name=HOSTILE, dtype=HOSTILE, shape=(1,))
    outputs = {HOSTILE: figures_of(0.5)}
    manifest = full_manifest(
        trtforge_version=HOSTILE,
        model=ModelInfo(name=HOSTILE, sha256=HOSTILE),
        backend=BackendInfo(name=HOSTILE, version=HOSTILE),
        targets=(HOSTILE, HOSTILE),
        precision=PrecisionInfo(
            requested=HOSTILE,
            nodes={HOSTILE: 1},
            gemm_flops_fraction={HOSTILE: 1.0},
            attention_flops_fraction={HOSTILE: 1.0},
            kept_float=(KeptFloatEntry(node=HOSTILE, reason=HOSTILE),),
        ),
        fusion=(FusionEntry(region=HOSTILE, pattern=HOSTILE, lowered_to=HOSTILE),),
        near_misses=(NearMissEntry(pattern=HOSTILE, node=HOSTILE, reason=HOSTILE),),
        plan=PlanInfo(
            kernels=1,
            gemm={HOSTILE: 1},
            fused_attention=0,
            layers=(
                PlanLayerEntry(
                    name=HOSTILE, type=HOSTILE, inputs=(tensor,), outputs=(tensor,), onnx_nodes=(HOSTILE,) * 9
                ),
            ),
        ),
        profiles=(ProfileInfo(name=HOSTILE, inputs={HOSTILE: bounds}, values={HOSTILE: bounds}),),
        io=(IoInfo(name=HOSTILE, mode="input", dtype=HOSTILE, shape=(HOSTILE,)),),
        calibration=CalibrationInfo(method=HOSTILE, samples=1, sha256=HOSTILE, amax={HOSTILE: 1.0}),
        parity=passed(
            passed=False,
            reference=HOSTILE,
            candidate=HOSTILE,
            note=HOSTILE,
            data_sha256=HOSTILE,
            outputs=outputs,
            batches=(),
            before_qdq=outputs,
            metrics={HOSTILE: {"fp32": 1.0, "candidate": 1.0}},
            worst_nodes=(NodeError(node=HOSTILE, sqnr_db=1.0),),
        ),
        lint=({HOSTILE: HOSTILE, "node": HOSTILE},),
        warnings=(HOSTILE,),
        files={HOSTILE: FileInfo(sha256=HOSTILE, bytes=1)},
        timings_s={HOSTILE: 1.0},
        environment={HOSTILE: {"a": HOSTILE}},
    )
    text = render_report(manifest, None)
    text.encode("utf-8")
    page = Page(text)
    assert page.tags.count("script") == 1
    assert page.tags.count("style") == 1
    assert "alert" not in page.script
    assert page.row(SHOWN)
    assert text.count("<script") == 1
    assert not re.search(r"[\x00\u202e\ud800]", text)
    for tag in ("h1", "svg", "nav"):
        assert page.tags.count(tag) == 1


@pytest.mark.parametrize("manifest", [full_manifest(), bare_manifest()])
def test_page_asks_for_nothing_from_outside(manifest: Manifest) -> None:
    text = render_report(manifest, full_table())
    assert not re.search(r"https?:|//[a-z]|\bsrc\s*=|url\(|@import|<link|<iframe|<img|<object", text)


def test_page_is_ascii_and_shows_other_scripts() -> None:
    text = render_report(bare_manifest(model=ModelInfo(name="mod\u00e8le-\u6a21", sha256=SHA)), None)
    assert text.isascii()
    assert "mod\u00e8le-\u6a21" in Page(text).text


def test_content_policy_allows_only_the_pages_own_script() -> None:
    page = full_page()
    (policy,) = [value for value in page.values("content") if value is not None and "default-src" in value]
    digest = base64.b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")


def test_equal_manifests_give_equal_pages() -> None:
    assert render_report(full_manifest(), full_table()) == render_report(full_manifest(), full_table())


def test_key_figures_of_an_int8_build() -> None:
    text = full_page().text
    assert "Cosine to fp320.99740lowest mean; budget 0.97, worst sample 0.98740" in text
    assert "Top-198.33 %fp32 98.61 %, before Q/DQ 98.61 %" in text
    assert "Engine5.12 MBmodel.onnx 7.40 MB" in text
    assert "Kernels77GEMM and convolution: 24 INT8" in text
    assert "GEMM FLOPs in INT898.43 %1.56 % fp16" in text
    assert "Fused attention6" in text


def test_key_figure_of_a_float_build_is_its_own_type() -> None:
    precision = PrecisionInfo(
        requested="fp16",
        nodes={"int8": 0, "fp16": 3},
        gemm_flops_fraction={"int8": 0.0, "fp16": 1.0},
        attention_flops_fraction={},
        kept_float=(),
    )
    text = full_page(precision=precision).text
    assert "GEMM FLOPs in fp16100.00 %" in text
    assert "GEMM FLOPs in INT8" not in text


def test_each_batch_size_and_the_cost_of_each_step_are_shown() -> None:
    page = full_page()
    rows = [row for row in page.cells if row[0] == "logits"]
    assert [row[1:3] for row in rows if len(row) == 8] == [["8", "360"], ["1", "16"]]
    assert rows[-1] == ["logits", "0.0001", "52.3 dB", "0.0026", "22.4 dB", "0.0025"]
    assert page.row("Top-1") == ["Top-1", "98.61 %", "98.61 %", "98.33 %", "-0.28 points"]


def test_with_many_outputs_the_worst_come_first_and_the_rest_is_folded() -> None:
    outputs = {f"out{i}": figures_of(0.99 - 0.0001 * i) for i in range(30)}
    page = full_page(parity=passed(outputs=outputs, batches=(), before_qdq={}))
    assert next(row[0] for row in page.cells if row[0].startswith("out")) == "out29"
    assert "18 more rows" in page.text


def test_nodes_kept_float_are_grouped_by_reason() -> None:
    page = full_page()
    row = page.row("attention products stay float")
    assert row[1] == "12"
    assert "/block.0/qk/MatMul" in row[2]
    assert "/block.11/qk/MatMul" in row[2]
    assert "6 more" in row[2]
    assert page.row("N is 10; an INT8 tile needs 16")[1:] == ["1", "/head/Gemm"]


def test_plan_shows_operands_and_nodes_and_what_it_proves() -> None:
    page = full_page()
    row = next(row for row in page.cells if "qkv_myl0_2" in row)
    assert row == [
        "1",
        "qkv_myl0_2",
        "gemm",
        "INT8 [-1, 384]INT8 [384, 1152]+ 2 more",
        "fp16 [-1, 1152]",
        "/block.0/qkv/MatMul",
    ]
    assert "TensorRT-RTX chooses each GEMM's kernel when the engine is loaded" in page.text
    assert "The engine holds the code of sm_86, its lowest target." in page.text
    assert page.row("gemm") == ["gemm", "INT8 ", "fp16 ", "1", "1 node/block.0/qkv/MatMul"]


def test_kernel_with_only_small_operands_shows_them_up_to_a_limit() -> None:
    small = tuple(PlanTensor(name=f"s{i}", dtype="fp32", shape=(1,)) for i in range(9))
    assert [tensor.name for tensor in figures.main_operands(small)] == [f"s{i}" for i in range(9)]
    text = Page(figures.operands(small)).text
    assert text.count("fp32 [1]") == figures.MAX_OPERANDS
    assert text.endswith("+ 3 more")


def test_plan_of_tensorrt_makes_no_claim_about_rtx() -> None:
    page = full_page(backend=BackendInfo(name="tensorrt", version="11.4"))
    assert "RTX" not in page.text
    assert "Read from the builder's own layer table." in page.text


def test_unreadable_plan_is_said_with_its_reason() -> None:
    plan = PlanInfo(kernels=0, gemm={}, fused_attention=0, layers=(), unreadable="the layer table is cut short")
    page = full_page(plan=plan)
    assert "The plan could not be read: the layer table is cut short" in page.text
    assert "Kernelsnot read" in page.text
    assert "Fused attention" not in page.text


def test_chart_keeps_the_manifests_order_and_marks_outliers() -> None:
    text = render_report(full_manifest(), full_table())
    titles = re.findall(r"<title>(\d.*?)</title>", text)
    assert titles == [
        "1. late - amax 2 - scale 0.01575 - rms 0.11 - rms at step 7.0 of 127 - 7 NaN or Inf",
        "2. early - amax 4 - scale 0.0315 - rms 1 - rms at step 31.8 of 127",
    ]
    assert re.findall(r'<g class="(.*?)">', text) == ["mark few", "mark"]
    assert "(1 of 2)" in text


def test_larger_amax_is_drawn_higher_on_a_logarithmic_axis() -> None:
    amax = {"a": 0.01, "b": 1.0, "c": 100.0}
    info = CalibrationInfo(method="minmax", samples=8, sha256=SHA, amax=amax)
    text = render_report(full_manifest(calibration=info), None)
    a, b, c = (float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', text))
    assert c < b < a
    assert b == pytest.approx((a + c) / 2, abs=0.2)


@pytest.mark.parametrize("amax", [{"zero": 0.0}, {"one": 3.0}, {"tiny": 1e-30, "zero": 0.0, "huge": 1e30}])
def test_chart_holds_any_range(amax: dict[str, float]) -> None:
    info = CalibrationInfo(method="minmax", samples=8, sha256=SHA, amax=amax)
    text = render_report(full_manifest(calibration=info), None)
    Page(text)
    assert text.count("<circle") == len(amax)
    assert ("amax is 0" in text) == (0.0 in amax.values())
    assert all(0 <= float(y) <= 320 for y in re.findall(r'(?:cy|y1|y2)="([-\d.]+)"', text))


def test_table_alone_gives_the_chart_in_its_own_order() -> None:
    page = Page(render_report(full_manifest(calibration=None), full_table()))
    assert [row[1] for row in page.cells if len(row) == 9][1:] == ["early", "late"]
    assert "Method percentile 99.99 over 512 samples." in page.text


def test_profiles_inputs_lint_files_and_environment_are_listed() -> None:
    page = full_page()
    assert page.row("default") == ["default", "pixels", "[1, 3]", "[8, 3]", "[32, 3]"]
    assert ["default", "rate (values)", "[16000]", "[16000]", "[16000]"] in page.cells
    assert page.row("pixels") == ["pixels", "input", "float32", "[batch, ?, 3]"]
    assert page.row("fp32-scale") == ["fp32-scale", "/stem/Conv", "the scale is fp32"]
    assert page.row("model.engine") == ["model.engine", "5.12 MB", ""]
    assert page.row("attention") == ["attention", "Attention-23", "1", "/block.0/qk/MatMul"]
    assert page.row("conv_silu") == ["conv_silu", "two consumers", "1", "/stem/Conv"]
    assert page.row("packages.onnxruntime") == ["packages.onnxruntime", "1.32.0"]
    assert page.row("tf32") == ["tf32", "true"]
    assert page.row("evaluation data") == ["evaluation data", SHA]
    assert "calibration and evaluation share 3 samples" in page.text


def test_times_are_shares_of_the_total() -> None:
    page = full_page(timings_s={"calibrate": 3.0, "build": 1.0, "total": 5.0})
    assert "flex-grow:0.600000" in page.values("style")
    assert "calibrate 3.00 s" in page.text
    assert "5.00 s in all." in page.text
    assert "total 5.00 s" not in page.text


def test_figures_are_never_rounded_up() -> None:
    assert figures.cosine(0.969996) == "0.96999"
    assert figures.cosine(1.0) == "1.00000"
    assert figures.cosine(-0.000001) == "-0.00001"
    assert figures.percent(0.999999) == "99.99 %"
    assert figures.percent(1.0) == "100.00 %"
    assert figures.percent(0.00001) == "< 0.01 %"
    assert figures.percent(0.0) == "0.00 %"
    assert figures.percent(0.29) == "29.00 %"


def test_sizes_and_seconds_have_three_digits() -> None:
    assert [figures.size(n) for n in (0, 999, 1000, 999_600, 12_345_678, 2_000_000_000)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "1.00 MB",
        "12.3 MB",
        "2.00 GB",
    ]
    assert [figures.seconds(v) for v in (0.03, 12.34, 312.4)] == ["0.03 s", "12.3 s", "312 s"]


@pytest.mark.parametrize(
    ("dtype", "shown", "style"),
    [
        ("Int8", "INT8", "t-int8"),
        ("Half", "fp16", "t-fp16"),
        ("float32", "fp32", "t-fp32"),
        ("int64", "int64", "t-other"),
    ],
)
def test_element_types_have_one_spelling_and_one_colour(dtype: str, shown: str, style: str) -> None:
    assert (figures.type_name(dtype), figures.type_class(dtype)) == (shown, style)


def test_sqnr_is_exact_only_where_nothing_differs() -> None:
    def output(sqnr_db: float | None, error: float, nan: bool) -> OutputParity:
        return OutputParity(cosine=1.0, cosine_min=1.0, sqnr_db=sqnr_db, max_abs_error=error, nan=nan)

    assert figures.decibel(output(41.26, 0.1, False)) == "41.3 dB"
    assert figures.decibel(output(None, 0.0, False)) == "exact"
    assert figures.decibel(output(None, 0.0, True)) == figures.decibel(output(None, 1.0, False)) == "-"
