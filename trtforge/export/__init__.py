"""PyTorch models as ONNX: a function of the user's, a Hugging Face folder, or a `.pt2` program.

torch is imported by the child process alone: folder.py, program.py, parity.py and run.py work without it.
"""
