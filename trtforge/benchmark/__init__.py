"""Measure the CUDA plugin of transformer blocks: correctness first, then time, against other ways to compute a block.

What runs on the GPU machine needs nothing but the standard library, numpy, cupy and torch, so that it works from a
bare checkout: there the modules of this package import no other dependency of trtforge. `history` and `page`, which
read and show results, do.
"""
