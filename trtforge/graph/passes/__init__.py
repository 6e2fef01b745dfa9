"""Passes that clean a graph or spell it differently; `graph/simplify.py` puts them in order."""
