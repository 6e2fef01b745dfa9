"""Fusion: respell regions of a graph so that the builder fuses them; one pattern per file."""
