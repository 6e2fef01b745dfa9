"""trtforge: TensorRT engines that are small, fast and proven accurate, from one command."""

__version__ = "0.1.0"
