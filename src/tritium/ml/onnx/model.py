"""`ONNXModel`: a model in an ONNX file as a Spark ML transformer (driver)."""

from __future__ import annotations

from tritium.ml.model import TrainedModel


class ONNXModel(TrainedModel):
    """An ONNX model that adds its predictions to a DataFrame: Spark's, batch or streaming, or one of pandas."""

    def content(self) -> bytes:
        """Return the ONNX file, which `onnx.load_model_from_string` and other runtimes read."""
        content: bytes = self.model.module.content
        return content
