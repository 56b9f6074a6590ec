"""Posteriors as files that run without Credo: ONNX and torch.export."""

from credo.exporting.export import export

__all__ = ["export"]
