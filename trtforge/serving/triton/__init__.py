"""The real Triton Inference Server: find or install it, run it on this machine, and talk to it."""
