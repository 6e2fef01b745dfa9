"""Automatic mixed precision: which nodes stay float so that a budget on the model's outputs is met."""
