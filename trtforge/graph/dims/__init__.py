"""What a graph says of its open dimensions; `report.py` is what the rest of trtforge asks."""
