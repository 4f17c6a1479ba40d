"""An empty tensor at any index of the virtual device, by DLPack: the one public way to say where memory lies.

``torch_device.py`` makes its templates of it.  Source: https://dmlc.github.io/dlpack/latest/c_api.html.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["Empty"]

_EXTENSION = 12
_UINT, _BITS = 1, 8


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)))


_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
#: Whoever consumed a capsule refers to it as long as its tensor lives, here for ever.
_consumed: list[Any] = []


class Empty:
    """uint8 [0] at an index of torch's extension device."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __dlpack_device__(self) -> tuple[int, int]:
        return _EXTENSION, self._index

    def __dlpack__(self, **_: Any) -> Any:
        shape, strides = (ctypes.c_int64 * 1)(0), (ctypes.c_int64 * 1)(1)
        managed = _Managed()
        managed.tensor.device = _Device(_EXTENSION, self._index)
        managed.tensor.ndim, managed.tensor.dtype = 1, _DataType(_UINT, _BITS, 1)
        managed.tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
        managed.tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
        managed.deleter = type(managed.deleter)(_nothing)
        _consumed.append((managed, shape, strides))
        return _new_capsule(ctypes.addressof(managed), b"dltensor", None)


def _nothing(_: Any) -> None:
    return None
