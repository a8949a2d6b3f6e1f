"""Sweeps: YAML files in Weights & Biases' format, and a runner that needs no server."""
