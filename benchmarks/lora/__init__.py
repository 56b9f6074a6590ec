"""Adapters of a pretrained sentence encoder: `python -m benchmarks.lora`."""
