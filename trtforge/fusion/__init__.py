"""Fusion: find regions of a graph, and respell them so that the builder fuses them; one pattern per file."""
