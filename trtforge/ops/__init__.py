"""Operators of the domain `trtforge`: one file each, with its inputs, attributes and ONNX function bodies."""
