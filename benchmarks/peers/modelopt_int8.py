"""ModelOpt's ONNX quantizer, INT8 with its defaults, one model a process.

python modelopt_int8.py MODEL.onnx CALIB.npz OUT.onnx {max,entropy}
"""

import sys

import numpy as np
from modelopt.onnx.quantization import quantize


def main() -> None:
    """Quantize one model."""
    model, calib, out, method = sys.argv[1:]
    quantize(
        model,
        quantize_mode="int8",
        calibration_data=dict(np.load(calib)),
        calibration_method=method,
        output_path=out,
    )


if __name__ == "__main__":
    main()
