"""Kept for one caller: `copy_graph` lives in graph/edit.py."""

from trtforge.graph.edit import copy_graph

__all__ = ["copy_graph"]
