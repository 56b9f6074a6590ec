"""Eight-bit weights in an ONNX file: the dynamic quantisation of onnxruntime."""

from __future__ import annotations

from pathlib import Path

from credo.core.support.extras import needs

# Of the largest output. Rounding to eight bits may show; a wrong graph is further off.
TOLERANCE = 0.1


def quantize_(path: Path) -> None:
    """Replace an ONNX file by one whose matrices and kernels are int8, and whose activations are rounded as it runs.

    Args:
        path: The file.
    """
    with needs("export", "A file with eight-bit weights"):
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic
    graph = onnx.load(str(path))
    del graph.graph.value_info[:]  # shapes of the exporter, which contradict transposed weights
    graph.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")  # else it asks for that
    quantize_dynamic(graph, str(path), weight_type=QuantType.QInt8)
