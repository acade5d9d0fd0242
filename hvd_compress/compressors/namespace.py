"""The public namespace of compressors."""

from __future__ import annotations

from typing import Any

from .. import compressors
from ..common.error_text import error_text
from .registry import COMPRESSORS


class _Registered(type):
    """Looks attributes up in the register: an instance where a name needs no arguments, else the class."""

    def __getattr__(cls, name: str) -> Any:
        registered = {**COMPRESSORS.classes, **COMPRESSORS.instances}
        if name not in registered:
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return registered[name]

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *COMPRESSORS.classes, *COMPRESSORS.instances]


class Compression(metaclass=_Registered):
    """The compressors, as Horovod's `Compression`: `hvdc.Compression.int8`, `hvdc.Compression.topk(0.01)`.

    Each has a spec string (`str(compressor)`) that `parse` turns back into the compressor.
    """

    # For editors and type checkers. The values, and further names, come from the register.
    none: compressors.NoCompression
    fp16: compressors.Float16
    bf16: compressors.BFloat16
    int8: compressors.Quantize
    int4: compressors.Quantize
    int2: compressors.Int2
    hadamard: compressors.Hadamard
    onebit: compressors.OneBit
    quantize: type[compressors.Quantize]
    topk: type[compressors.TopK]
    randomk: type[compressors.RandomK]
    block_topk: type[compressors.BlockTopK]
    block_sparse: type[compressors.BlockSparse]
    hybrid: type[compressors.Hybrid]
    dgc: type[compressors.DGC]
    powersgd: type[compressors.PowerSGD]
    auto: type[compressors.Auto]
    schedule: type[compressors.Schedule]

    @staticmethod
    def parse(spec: str) -> compressors.Compressor:
        """Makes a compressor from its spec string, such as `"topk:ratio=0.01"`.

        Args:
            spec: A name, then optionally a colon and arguments as `key=value`, separated by commas. A value may be a
                list, `(item|item)`, whose items may be spec strings. Before a list, the name of the first argument may
                be left out: `"schedule:(0=int8|30%=int4),steps=10000"`.

        Raises:
            TypeError: `spec` is not a string.
            ValueError: The name, an argument or a value is not known or not valid, or parentheses do not match.
        """
        if not isinstance(spec, str):
            raise TypeError(f"a spec must be a string such as 'topk:ratio=0.01', got {error_text(spec)}")
        return COMPRESSORS.parse(spec)
