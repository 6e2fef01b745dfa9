"""Text models that are served with their tokenizer: a front that takes strings, and a model for each length bucket."""
