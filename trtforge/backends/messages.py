"""The builders' messages that are known, one row each: the kind of failure, why, and what to do.

Rows are tried in order against the text that diagnose.py lays out: `op=Conv`, then the messages, each on lines of its
own. Found by building every test model that ONNX ships and one small model per pattern that breaks real files
(TensorRT-RTX 1.7.1, parser of TensorRT 11); rows marked "text only" were read in reports and never seen here.
"""

from __future__ import annotations

from trtforge.backends.message_rule import Rule
from trtforge.backends.operator_messages import (
    ATTRIBUTES,
    CONTROL_FLOW,
    MISSING_OPERATORS,
    QUANTIZATION,
    UNSUPPORTED_USES,
)
from trtforge.errors import REDUCE_HINT

_EXPORT_CONSTANT = "make it a constant when exporting the model, or fix the size that it comes from in the profile"
_CHECK_SIZES = "check the model and the ranges of the profile; the model may need some sizes fixed"
_CAST = "cast it to float32, float16, int32 or int64 when exporting the model"
_PROFILES = (
    Rule(
        "profile-shapes",
        r"k(MIN|OPT|MAX) values for profile (\d+) violate shape constraints: (.*)",
        "optimisation profile {1} does not fit the model at {0}: {2}",
        "choose sizes that fit together; inputs that share a dimension need the same name for it in the profile",
    ),
    Rule(
        "profile-fixed-dim",
        r"Dimension mismatch for tensor (.+) and profile (\d+)\. At dimension axis (\d+), profile has (.*?) but tensor "
        r"has (\d+)",
        "optimisation profile {1} gives axis {2} of input '{0}' the range {3}, but the model fixes it to {4}",
        "correct the profile",
        subject="model",
    ),
    Rule(
        "profile-dim-name",
        r"[Ii]nput dimensions with this name have different",
        "dims of one name have different sizes in the profile, and {builder} takes one name for one size: {message}",
        "give the dims of the model's inputs names of their own, or one range",
        subject="model",
    ),
    Rule(
        "profile-missing",
        r"has dynamic or shape inputs, but no optimization profile",
        "the model has open sizes and there is no optimisation profile",
        "give one: trtforge profile MODEL prints it",
        subject="model",
    ),
)
_TYPES = (
    Rule(
        "input-type",
        r"ERROR: (.*):\d+ In function importInput:",
        "input '{0}' has an element type that {builder} does not have",
        _CAST,
        subject="model",
    ),
    Rule(
        "constant-type",
        r"Failed to import initializer: (\S+)$",
        "constant '{0}' has an element type that {builder} does not have",
        _CAST,
        subject="model",
    ),
    Rule(
        "operator-type",
        r"requires inputs with type (.*?)\. But type is (\w+)",
        "{op} does not take {1}",
        "cast its inputs to float32, float16 or int32",
    ),
    Rule(
        "operator-type",
        r"has type (\w+) but must have type",
        "{op} does not take {0}",
        "cast its inputs to float32, float16 or int32",
    ),
    Rule(
        "operator-type",
        r"Found unsupported input type of (\w+)",
        "{op} does not take the type {0}",
        "cast its inputs to float32, float16 or int32",
    ),
    Rule(
        "operator-type",
        r"convertDtype\(onnxType, &newType\)|Unsupported cast|unsupported data type (\w*)|Unsupported data type in|"
        r"only supports floating-point, INT32, or INT64|does not support (UINT8) types for intermediate tensors",
        "{op} reads or makes a type that {builder} does not have there",
        _CAST,
    ),
    Rule(
        "operator-type",
        r"Tensor (\S+) has datatype (\w+) but is not (produced|consumed) by",
        "{1} exists only between Q/DQ operators and constants, but another operator has tensor '{0}' in it",
        "use QuantizeLinear and DequantizeLinear in the place of Cast, or another type",
    ),
    Rule(
        "mixed-types",
        r"must have same input types. But they are of types (\w+) and (\w+)|of same types but has (\w+) and (\w+)",
        "its inputs have different element types",
        "insert a Cast in front of one of them",
    ),
    Rule(
        "type-of-target",
        r"model contains HW-specific datatypes: b16",
        "the model holds bf16, which sm_75 does not have",
        "build with --fp16 in the place of --bf16, or for sm_80 or newer",
        subject="model",
    ),
    Rule(
        "type-of-target",
        r"model contains HW-specific datatypes: ([\w, ]+)",
        "the model holds {0}, which not every target has",
        "FP8 needs --gpu sm_89 or newer, FP4 needs sm_120; build one artifact for those and another for older targets",
        subject="model",
    ),
    Rule(
        "kernel-of-target",
        r"for Turing \(SM75\): (.*)",
        "sm_75 cannot run it: {0}",
        "build with --int8 --fp16 or --fp16, or for sm_80 or newer",
        subject="model",
    ),
)
_CONSTANTS = (
    Rule(
        "runtime-constant",
        r"must resolve to a build-time constant|must be an initializer|axis is not a constant|"
        r"training_mode input as an initializer",
        "an input of {op} is computed at run time but has to be a constant",
        _EXPORT_CONSTANT,
    ),
    Rule(
        "float-shape",
        r"Network input (\S+) is a shape tensor and must have type Int32 or Int64",
        "input '{0}' decides a size at run time but is no integer",
        "make it a constant when exporting the model, or let the model take sizes in the place of scales",
    ),
    Rule(
        "runtime-weight",
        r"condition: allDimsGtEq\(kernelSize, 1\)",
        "its weight is computed at run time and has no fixed kernel size",
        "give the model a constant weight, or fix the size of the weight's window",
        ("Conv", "ConvTranspose"),
    ),
)
_KERNELS = (
    Rule(
        "no-kernel",
        r"^op=NonMaxSuppression\n(?s:.*)has no runners that implement it",
        "{builder} has no kernel for NonMaxSuppression in this form",
        "let the model end at the boxes and scores, and choose among them outside the engine",
    ),
    Rule(
        "no-kernel",
        # "Could not find": text only.
        r"(?i)could not find any implementation|has no runners that implement it",
        "{builder} has no kernel for this node in this type and shape",
        "keep the node in a wider type (recipe: exclude), or change its channels or groups",
    ),
    Rule(
        "workspace",
        r"no tactics to implement the operation within workspace limit",
        "no kernel can do with the scratch memory that --workspace allows",
        "give a larger --workspace, or leave it out for all of the GPU's memory",
        subject="last",
    ),
    Rule(
        "out-of-memory",
        r"(?i)out ?of ?memory|bad_alloc|failed to allocate",
        "memory ran out",
        "close other programs, lower the largest shapes, or use a machine with more memory",
        subject="last",
    ),
)
_SHAPES = (
    Rule(
        "missing-tensor",
        r"Node input was not registered",
        "it reads a tensor that nothing before it makes",
        "check the model with onnx.checker: the file is damaged or its nodes are not in order",
    ),
    Rule(
        "shape-mismatch",
        r"no integer solution|dimensions not compatible|Shape Error|but must match|failed to broadcast to input|"
        r"Error while computing output extent|number of dimensions should remain the same|must align with|"
        r"misaligns with|must have inputs with same shape|must be twice the length",
        "shapes inside the model do not fit: {message}",
        _CHECK_SIZES,
    ),
)
RULES = (
    *MISSING_OPERATORS,
    *QUANTIZATION,
    *UNSUPPORTED_USES,
    *_PROFILES,
    *_TYPES,
    *_CONSTANTS,
    *ATTRIBUTES,
    *CONTROL_FLOW,
    *_KERNELS,
    *_SHAPES,
    Rule(
        "internal-error",
        r"Myelin \(|CHECK\w*\(",
        "{builder} fails inside on this combination of nodes, types and shapes: {message}",
        f"{REDUCE_HINT}, and build it in another precision or export it in another way",
    ),
)
UNKNOWN = Rule(
    "unknown",
    "",
    "{message}",
    f"{REDUCE_HINT}, and export it in another way or keep it out of the engine",
)
