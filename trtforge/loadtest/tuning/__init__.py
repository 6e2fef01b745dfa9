"""Choose batching settings by measurement."""
