"""The stage cache: `store.py` is what a job uses."""
