"""Build the digits vision transformer in fp32, fp16 and INT8, and print accuracy, engine size and time side by side.

Run by `make demo`; needs no torch and no GPU. The artifacts are in `build/`; open `build/digits-int8/report.html`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import trtforge
from trtforge.cli.render import progress_reporter

HERE = Path(__file__).parent
PRECISIONS = ("fp32", "fp16", "int8")


def main() -> int:
    """Build three artifacts and print one table; returns 1 when one of them misses its accuracy budget."""
    columns = ("precision", "top-1", "errors", "cosine", "engine", "INT8 GEMM", "kernels", "seconds")
    print("  ".join(f"{column:>9}" for column in columns))
    passed = True
    for precision in PRECISIONS:
        with progress_reporter() as report:
            result = trtforge.build(
                HERE / "model.onnx",
                precision=precision,
                recipe=str(HERE / "recipe.yaml"),
                eval=str(HERE / "eval.npz"),
                output=Path("build") / f"digits-{precision}",
                force=True,
                report=report,
            )
        m = result.manifest
        top1 = m.parity.metrics["top1"]["candidate"]
        cells = (
            precision,
            f"{top1:.2%}",
            str(round((1 - top1) * m.parity.samples)),
            f"{m.parity.outputs['logits'].cosine:.5f}",
            f"{m.files['model.engine'].bytes / 1e6:.1f} MB",
            f"{m.precision.gemm_flops_fraction.get('int8', 0.0):.1%}",
            str(m.plan.kernels),
            f"{sum(m.timings_s.values()):.1f}",
        )
        print("  ".join(f"{cell:>9}" for cell in cells))
        passed = passed and result.passed
    print("\ntop-1, errors, cosine: the built graph in ONNX Runtime on 360 held-out images, not the engine on a GPU")
    print("INT8 GEMM: share of the weighted nodes' FLOPs, read from the engine's compiled plan")
    print("Have a look at build/digits-int8/report.html")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
