"""The builders' messages about operators, their attributes and their quantization; see messages.py."""

from __future__ import annotations

from trtforge.backends.message_rule import Rule

_DYNAMIC_QUANTIZATION = (
    "DynamicQuantizeLinear|MatMulInteger|ConvInteger|DynamicQuantizeLSTM|DynamicQuantizeMatMul|QLinear[A-Za-z]*"
)
_FROM_FLOAT = "start from the float model and let trtforge quantize it"
_OTHER_OPS = "replace {op} by other ONNX operators"
MISSING_OPERATORS = (
    Rule(
        "needs-gpu",
        r"\b(\w{1,80}) plugin was not found in the plugin registry",
        "{builder} computes {op} with its plugin {0}, which can only be made on a machine with a GPU",
        "build on a machine with a GPU, or replace {op} by other ONNX operators",
    ),
    Rule(
        "missing-operator",
        r"Plugin not found, are the plugin name|plugin creator version \d+ was not found",
        "{builder} has no operator {op}",
        "replace {op} by standard ONNX operators, for example by exporting the model again without fused operators",
    ),
    Rule(
        "dynamic-quantization",
        rf"^op=(?:{_DYNAMIC_QUANTIZATION})\n",
        "{op} belongs to dynamic or operator-oriented quantization, which {builder} does not support",
        _FROM_FLOAT,
    ),
)
UNSUPPORTED_USES = (
    Rule(
        "sequence",
        r"^op=((?:Sequence|SplitToSequence|ConcatFromSequence|Optional)\w*)\n",
        "{op} works on sequences or optional values, which {builder} does not have",
        "export the model without sequences: torch.stack, torch.split and list comprehensions are the usual causes",
    ),
    Rule(
        "unsupported-use",
        r"\nfalse$",
        "{builder} does not support this use of {op} and gives no reason",
        f"{_OTHER_OPS}; an attribute or an input of it is the likely cause",
    ),
)
QUANTIZATION = (
    Rule(
        "nonzero-zero-point",
        r"Non-zero zero point is not supported",
        "{builder} takes symmetric quantization only: every zero-point has to be 0",
        f"{_FROM_FLOAT}, or quantize again with symmetric ranges",
    ),
    Rule(
        "runtime-zero-point",
        r"has `zero_point` which is not an initializer",
        "a zero-point is computed at run time but has to be a constant 0",
        _FROM_FLOAT,
        ("QuantizeLinear", "DequantizeLinear"),
    ),
    Rule(
        "invalid-scale",
        r"Scale coefficients must all be positive",
        "a quantization scale is zero, negative or not a number",
        f"{_FROM_FLOAT}, or mend the scale",
    ),
    Rule(
        "int32-dequantize",
        r"input has type Int32 but must have type FP8",
        "it dequantizes INT32, usually a quantized bias, which {builder} does not support",
        f"keep biases in float: {_FROM_FLOAT}",
    ),
    Rule(
        "odd-4-bit",
        r"4-bit quantization requ\w+ an even number of elements",
        "it holds an odd number of 4-bit elements",
        "pad the tensor to an even number of elements, or keep it in 8 bits",
    ),
)
ATTRIBUTES = (
    Rule(
        "deconv-dilation",
        r"Strided & Dilated Deconv are currently not supported",
        "{builder} has no ConvTranspose with a stride and a dilation",
        "give the ConvTranspose dilation 1 or stride 1",
        ("ConvTranspose",),
    ),
    Rule(
        "pool-dilation",
        r"does not support dilations other than 1",
        "{builder} has no {op} with a dilation",
        "give {op} dilation 1",
        ("AveragePool", "MaxPool", "LpPool"),
    ),
    Rule(
        "pool-rank",
        r"\(windowSize\)\.nbDims == 2 \|\| \(windowSize\)\.nbDims == 3",
        "{builder} pools two or three axes only",
        "add an axis of size 1 in front of {op} and remove it behind",
        ("AveragePool", "MaxPool", "LpPool"),
    ),
    Rule(
        "extra-outputs",
        r"doesn't support mode than 1 outputs for (\w+) nodes",
        "{builder} gives only the first output of {op}",
        "remove the readers of the other outputs",
    ),
    Rule(
        "resize-mode",
        r"transformationMode == |\(antialias == 0\)|keep_aspect_ratio_policy == |`axes` attribute is supported",
        "{builder} does not have this mode of Resize",
        "use coordinate_transformation_mode half_pixel, pytorch_half_pixel, align_corners, asymmetric or "
        "tf_half_pixel_for_nn, without antialias and aspect ratio policy",
        ("Resize",),
    ),
    Rule(
        "scatter-reduction",
        r"ScatterND with reduction is not supported|Unsupported reduction type",
        "{op} has no reduction in {builder}",
        "replace the reduction, for example by a MatMul with one-hot rows",
    ),
    Rule(
        "integer-mod",
        r"fmod attribute is set to 0\. Inputs cannot be of floating point types",
        "Mod of floats needs fmod = 1: Inputs cannot be of floating point types",
        "set fmod = 1, or cast the inputs to int32",
        ("Mod",),
    ),
    Rule(
        "lp-norm",
        r"\(p == 1 \|\| p == 2\)",
        "{builder} has the norms of order 1 and 2 only",
        "replace {op} by Abs, Pow and AveragePool",
        ("LpPool", "LpNormalization", "GlobalLpPool"),
    ),
    Rule(
        "training-mode",
        r"!isTraining",
        "the model was exported in training mode",
        "call model.eval() before exporting it",
    ),
    Rule(
        "topk-limit",
        r"K exceeds the maximum value allowed \((\d+)\)",
        "TopK of {builder} takes at most {0} elements",
        "lower k, or leave the sorting to the code around the engine",
        ("TopK",),
    ),
    Rule(
        "invalid-attribute",
        r"Parameter check failed, condition: (.*)|(Axis must be in the range .*)",
        "an attribute or a size of {op} is out of the range that {builder} takes: {message}",
        "check {op} with onnx.checker; {builder} takes no negative padding and windows of two or three axes",
    ),
    Rule(
        "uneven-split",
        r"The last chunk size is negative",
        "its sizes do not add up to the axis that it splits",
        "write the sizes of Split out when exporting the model",
        ("Split",),
    ),
    Rule(
        "attention-kernel",
        r"composite_op->is_decomposable\(\)",
        "{builder} has no fused kernel for this attention: its type or head size is not among those of the kernels",
        "build with --fp16 or --bf16 and a head size of at most 256, a multiple of 8",
        ("Attention",),
    ),
    Rule(
        "attention-cache",
        r"only supports Attention nodes with one output|Key and Value must have the same shape",
        "Attention of {builder} takes no cache and needs keys and values of one shape",
        "concatenate the cache to K and V in front of Attention, or export with opset 20, which writes it out",
        ("Attention",),
    ),
    Rule(
        "attention-option",
        r"Setting softcap is not supported|CausalMaskKind::kNONE\. Option mask cannot be used together",
        "Attention of {builder} has no softcap, and either a mask or is_causal",
        "put the causal part into the mask, or export with opset 20, which writes the attention out",
        ("Attention",),
    ),
    Rule(
        "cache-scatter",
        r"past_cache tensor is required to be 4D|Only linear mode is supported for now|"
        r"cache tensor must be a network input",
        "TensorScatter of {builder} takes a cache [batch, heads, length, size] that is an input, in linear mode only",
        "make the cache an input and an output of the model, or use ScatterElements",
        ("TensorScatter",),
    ),
)
CONTROL_FLOW = (
    Rule(
        "branch-ranks",
        # "kUNDEFINED": text only.
        r"inputs with equal ranks when condition is not a build-time constant|graphScope.*kUNDEFINED",
        "the branches of an If give results of different rank, and its condition is known at run time only",
        "fix the size that the condition asks for in the profile, or export with that case alone",
        ("If",),
    ),
    Rule(
        "circular-size",
        r"isInFlight\(p\.second\.symbolicRep\)",
        "the size of its result depends on a value that {builder} cannot compute in a build",
        "make what decides the size a constant, or an integer input with values in the profile",
    ),
    Rule(
        "trip-count",
        r"no trip limit was set",
        "the Loop has no trip count, so {builder} does not know how long its scan outputs are",
        "give the Loop a trip count when exporting the model: for loops over a range have one, while loops do not",
        ("Loop",),
    ),
    Rule(
        "squeeze-axes",
        r"ISqueezeLayer without an axes input",
        "Squeeze names no axes, and which ones have size 1 is not known",
        "write the axes out when exporting the model, or fix those sizes in the profile",
        ("Squeeze",),
    ),
)
