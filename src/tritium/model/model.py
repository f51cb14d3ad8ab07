"""`Model`: a trained module with its signature; it knows no Spark (any process)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tritium.errors import BadSetting, UntrustedModel
from tritium.model import files
from tritium.model.copies import Copies
from tritium.model.signature import Signature

if TYPE_CHECKING:
    import numpy as np
    import torch

_WEIGHTS, _SIGNATURE, _HISTORY, _CODE = "model.safetensors", "signature.json", "history.json", "module.pkl"


class Model:
    """A PyTorch module, what it takes and gives, and how its training went.

    `history` is one dict per epoch. `origin` is the function or class without arguments that makes such a
    module, or its "package.module:name": a saved model then names it, and whoever loads it says that this may run
    (`load`). Without one that can be imported, the module is saved by value, and loading it runs code from the file.
    `seed` is what torch, NumPy and `random` were seeded with when `origin` made the module; `load` seeds them so again,
    for what it draws beside its weights. An estimator gives it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        signature: Signature,
        *,
        history: Sequence[Mapping[str, Any]] = (),
        origin: Any = None,
        seed: int | None = None,
    ) -> None:
        from tritium.model.module import importable

        self.module = module
        self.signature = signature
        self.history = [dict(epoch) for epoch in history]
        self.origin = importable(origin)
        self.seed = seed
        self._copies = Copies()

    def __repr__(self) -> str:
        inputs = ", ".join(i.name for i in self.signature.inputs)
        return f"Model({type(self.module).__name__}: {inputs} -> {', '.join(o.name for o in self.signature.outputs)})"

    def predict(
        self, data: Any, *, batch_size: int = 1024, device: str | None = None
    ) -> np.ndarray[Any, Any] | dict[str, np.ndarray[Any, Any]]:
        """The predictions for a pandas DataFrame, an Arrow table, an array or a tensor `[rows, *shape]`, or a
        mapping of those by the names of the inputs.

        One output gives an array: float64 `[rows]` for one number a row, else `[rows, *shape]`.
        Classification gives a dict of `prediction` (the class index, float64 `[rows]`) and `probability`
        (float64 `[rows, classes]`), several outputs a dict by their names. `device=None` is where the module
        is. For another device one copy of the module is kept there, as long as this model lives; each call uses the
        weights that the module has then.

        Raises SignatureMismatch with every difference, and BadRow for a null or a NaN.
        """
        from tritium.model.score import evaluating, pick_device, score
        from tritium.model.table import arrays

        check_batch_size(batch_size)
        where = pick_device(device, self.module)
        moves = device is not None and where != pick_device(None, self.module)
        module = self._copies.on(where, self.module) if moves else self.module
        inputs = arrays(self.signature, data)
        with evaluating(module):
            found = score(module, self.signature, inputs, batch_size=batch_size, device=where)
        return found["prediction"] if len(found) == 1 else found

    def save(self, path: str, overwrite: bool = False) -> None:
        """Write the model as a directory at `path`, a local path or any fsspec URL ("s3://models/bikes")."""
        from tritium.model.module import by_value, trainable
        from tritium.model.weights import Tensors

        tensors = Tensors.of(self.module)
        contents: dict[str, Any] = {
            _WEIGHTS: tensors.stream(),
            _SIGNATURE: [json.dumps(self.signature.to_json(), indent=2).encode()],
            _HISTORY: [json.dumps(self.history, indent=2).encode()],
        }
        if self.origin is None:
            contents[_CODE] = [by_value(self.module, tensors.named)]
        made = {"import": self.origin} | ({} if self.seed is None else {"seed": self.seed})
        facts = {
            "versions": files.versions(),
            "module": made if self.origin else {"by value": _CODE},
            "trainable": trainable(tensors.named),
        }
        files.save(path, contents, facts, overwrite=overwrite)


def load(path: str, trusted: bool | str | Sequence[str] = False) -> Model:
    """The model that was saved at `path`, by `Model.save` or by `TorchModel.save`.

    Every file is checked against its SHA-256 first. A model is made by code: by the function or class that it names,
    or by code within it. Without `trusted` only the modules of torch.nn are made. `trusted="package.module:make_net"`
    (or several of those) also allows this function or class to be imported and called, `trusted="package"` every
    module class in the package and every function there whose annotation says that it returns one. Unless your
    program has imported them, they are not taken from the current directory. `trusted=True` runs whatever the files
    say, which a model by value needs.

    Raises UntrustedModel with what to do, and ModelError for a model that is damaged or does not fit its code.
    """
    from tritium.model.module import rebuild, restore
    from tritium.model.trust import Trust, factory
    from tritium.model.weights import read

    trust = Trust.of(trusted)
    path = files.located(str(path))
    manifest = files.read_manifest(path)
    origin, seed = manifest["module"].get("import"), manifest["module"].get("seed")
    if origin is None and not trust.everything:
        raise UntrustedModel(
            f"The model at {path!r} holds its code by value: loading it runs code from that file, with your rights, "
            "on this machine and on every executor that scores with it. If you know who made it and that nobody "
            "changed it since, say so: tr.load(path, trusted=True), or spark.tritium.trustModels=true for Spark ML's "
            "loaders.",
            path=path,
        )
    make = None if origin is None else factory(origin, trust, path)
    signature = Signature.from_json(json.loads(bytes(files.read(path, _SIGNATURE, manifest))))
    history = json.loads(bytes(files.read(path, _HISTORY, manifest)))
    tensors = read(files.read(path, _WEIGHTS, manifest))
    if make is not None:
        module = rebuild(origin, make, tensors, seed)
    else:
        module = restore(bytes(files.read(path, _CODE, manifest)), tensors, manifest["trainable"])
    module.eval()
    return Model(module, signature, history=history, origin=origin, seed=seed)


def check_batch_size(batch_size: int) -> None:
    """BadSetting unless it is a whole number of at least 1."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise BadSetting(f"batch_size={batch_size!r}: it must be a whole number of at least 1.")
