"""The plugin library: its sources, the tools that compile it, and what a compiled one holds."""
