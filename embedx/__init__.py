"""embedx: from any PyTorch model to embeddings, and from embeddings to maps a person can read."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from embedx import data as data
    from embedx import errors as errors
    from embedx import models as models
    from embedx import pooling as pooling
    from embedx import store as store
    from embedx.compare import compare as compare
    from embedx.evaluate import evaluate as evaluate
    from embedx.explain import explain as explain
    from embedx.export import export as export
    from embedx.extract import extract as extract
    from embedx.hooks import capture as capture
    from embedx.hooks import intervene as intervene
    from embedx.layers import layers as layers
    from embedx.project import project as project
    from embedx.record import join as join
    from embedx.record import record as record
    from embedx.search import search as search
    from embedx.store import open as open
    from embedx.view import view as view

# Public name -> module that defines it, imported when it is first used.
_PUBLIC = {
    "capture": "hooks",
    "compare": "compare",
    "evaluate": "evaluate",
    "explain": "explain",
    "export": "export",
    "extract": "extract",
    "intervene": "hooks",
    "join": "record",
    "layers": "layers",
    "open": "store",
    "project": "project",
    "record": "record",
    "search": "search",
    "view": "view",
}

# Modules with names that users need: embedx.models.Preprocess, embedx.errors.LayerError.
_MODULES = ("data", "errors", "models", "pooling", "store")

__all__ = [
    "capture",
    "compare",
    "evaluate",
    "explain",
    "export",
    "extract",
    "intervene",
    "join",
    "layers",
    "open",
    "project",
    "record",
    "search",
    "view",
]


class _Package(ModuleType):
    """A stage is a function in a module of the same name: the function is what users mean.

    Importing a submodule binds it on its package, which would hide the function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"embedx.{name}")
        if name not in _PUBLIC:
            raise AttributeError(f"module 'embedx' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"embedx.{_PUBLIC[name]}"), name)
        super().__setattr__(name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_PUBLIC, *_MODULES})


sys.modules[__name__].__class__ = _Package
