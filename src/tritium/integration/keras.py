"""A Keras model, its optimizer and its callbacks on the way to the ranks and back (driver and rank). Imports Keras."""

from __future__ import annotations

from tritium.frameworks.keras_fit import begin as begin_fit
from tritium.ml.keras.callback import of_this_rank
from tritium.ml.keras.portable import Portable, PortableModel, compile_arguments, packed, unpacked
from tritium.ml.keras.settings import without_model
from tritium.model.engines.keras_form import Form, remember
from tritium.model.engines.keras_here import set_random_seed
from tritium.model.engines.keras_weights import put as put_weights
from tritium.model.signature import Input, Output, Signature

__all__ = [
    "Form",
    "Input",
    "Output",
    "Portable",
    "PortableModel",
    "Signature",
    "begin_fit",
    "compile_arguments",
    "of_this_rank",
    "packed",
    "put_weights",
    "remember",
    "set_random_seed",
    "unpacked",
    "without_model",
]
