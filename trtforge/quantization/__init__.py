"""Quantization: observe activations, choose ranges, place Q/DQ pairs, insert them, cast the rest."""
