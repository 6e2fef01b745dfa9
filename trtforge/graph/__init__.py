"""The ONNX graph: reading and writing it, its signature, shapes, cost, clean-up passes and lint rules."""
