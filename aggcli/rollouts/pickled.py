"""What a pickle may build: numbers, texts, lists, dicts, tensors and numpy arrays, by a fixed table of names.

Every function of the table is this module's own and pure. What is built piece by piece stays a description until it is made
plain, and is then checked against the bytes that the file holds for it.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from aggcli.rollouts.limits import ENTRIES, NESTED, limit, raised

SCALARS = frozenset((type(None), bool, int, float, str, bytes))


class RefusedError(pickle.UnpicklingError):
    """What the pickle holds that is not plain data; the text completes `it holds ...`."""


class DamagedError(pickle.UnpicklingError):
    """Content that contradicts itself or the file's size; the text is the whole reason."""


class Made:
    """Something that a pickle builds piece by piece; only these may be given a state."""

    def set_state(self, state: Any) -> None:
        raise RefusedError(f"a state for {type(self).__name__}")

    def value(self) -> tuple[Any, int]:
        """The plain value it stands for, and the number of its entries."""
        raise RefusedError(f"a bare {type(self).__name__}")


class Storage(Made):
    """The bytes of tensors, and the number type of their elements; a file's own, read when the tensor is made."""

    def __init__(self, kind: str, elements: int, data: Any = None) -> None:
        self.kind, self.elements, self.data = kind, elements, data


class Tensor(Made):
    """A dense tensor: a view of a storage."""

    def __init__(self, storage: Storage, offset: int, size: tuple, stride: tuple, kind: str) -> None:
        self.parts = storage, offset, tuple(size), tuple(stride), kind

    def value(self) -> tuple[Any, int]:
        import torch

        storage, offset, size, stride, kind = self.parts
        numbers = (offset, *size, *stride)
        if len(size) != len(stride) or len(size) > 8 or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
            raise DamagedError("a tensor's shape is no shape")
        dtype = getattr(torch, kind)
        count = math.prod(size)
        if not count:
            return torch.empty(tuple(min(n, 2**31) for n in size), dtype=dtype), 1
        data = memoryview(storage.data if storage.data is not None else b"").cast("B")
        held = len(data) // dtype.itemsize
        if offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) >= held:
            raise DamagedError(f"a tensor of shape {size} reaches beyond the {len(data)} bytes that the file holds for it")
        flat = torch.frombuffer(data, dtype=dtype, count=held)
        return flat.as_strided(size, stride, offset), count


class _NumpyType(Made):
    """numpy's number types, texts and, of one dimension, objects."""

    def __init__(self, code: object, *_: object) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[biuf][1248]|U\d{1,6}|O8?|bool|(u?int|float)(8|16|32|64)", code):
            raise RefusedError(f"numpy's dtype {code!r:.40}")
        self.code = code
        self.order: Literal["<", ">", "=", "|"] = "="

    def set_state(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "=", "|"):
            raise DamagedError("a numpy dtype has no byte order")
        self.order = state[1]

    def read(self, data: Any, count: int) -> Any:
        import numpy as np

        if not isinstance(data, (bytes, str)):
            raise DamagedError("a numpy array holds no bytes")
        raw = data.encode("latin1") if isinstance(data, str) else data
        dtype = np.dtype(self.code).newbyteorder(self.order)
        if dtype.itemsize * count != len(raw):
            raise DamagedError(f"a numpy array of {count} entries has {len(raw)} bytes")
        return np.frombuffer(raw, dtype, count)


class _Array(Made):
    """A numpy array under construction."""

    def __init__(self, *_: object) -> None:
        self._state: Any = None

    def set_state(self, state: Any) -> None:
        self._state = state

    def value(self) -> tuple[Any, int]:
        state = self._state
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], _NumpyType):
            raise DamagedError("a numpy array has no content")
        _, shape, dtype, columns_first, raw = state
        return _array(raw, dtype, shape, bool(columns_first))


class _Buffer(Made):
    """A numpy array as newer numpy writes it: bytes, type, shape and order."""

    def __init__(self, raw: object, dtype: object, shape: object, order: object = "C", *_: object) -> None:
        self._parts = raw, dtype, shape, order == "F"

    def value(self) -> tuple[Any, int]:
        raw, dtype, shape, columns_first = self._parts
        if not isinstance(dtype, _NumpyType):
            raise DamagedError("a numpy array has no dtype")
        return _array(raw, dtype, shape, columns_first)


def _array(raw: Any, dtype: _NumpyType, shape: Any, columns_first: bool) -> tuple[Any, int]:
    if not isinstance(shape, tuple) or len(shape) > 8 or not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        raise DamagedError("a numpy array's shape is no shape")
    count = math.prod(shape)
    if dtype.code[0] == "O":
        if not isinstance(raw, list) or len(shape) != 1 or len(raw) != count:
            raise RefusedError("a numpy array of objects")
        return _walked(raw, {}, 1)
    array = dtype.read(raw, count).reshape(shape, order="F" if columns_first else "C")
    return (array.tolist() if dtype.code[0] == "U" else array), max(count, 1)


class _Scalar(Made):
    """One number of numpy's."""

    def __init__(self, dtype: object, raw: object = None) -> None:
        if not isinstance(dtype, _NumpyType) or dtype.code[0] == "O":
            raise RefusedError("a numpy scalar of objects")
        self._dtype, self._raw = dtype, raw

    def value(self) -> tuple[Any, int]:
        return self._dtype.read(self._raw, 1)[0].item(), 1


class StandIn(Made, dict):
    """Stands in for a class of the program that wrote the dump: keeps the items and the state it is given, does nothing."""

    def __init__(self, *arguments: object) -> None:
        super().__init__()
        self.state: object = next((a for a in reversed(arguments) if isinstance(a, Mapping) and not isinstance(a, Named)), None)

    def set_state(self, state: Any) -> None:
        self.state = state

    def value(self) -> tuple[Any, int]:
        has_batch = isinstance(self.state, Mapping) and "batch_dict" in self.state
        return _walked(dict(self.state) if has_batch and isinstance(self.state, Mapping) else dict(self), {}, 1)


class Named:
    """A name of the table: calls its own function and nothing else. One for each mention, so that no file can
    change it for the next.
    """

    __slots__ = ("call", "name")

    def __init__(self, name: str, call: Callable[..., Any] | None) -> None:
        self.name, self.call = name, call


# -- the table ----------------------------------------------------------------------------------------------------------

KINDS = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
"""torch's name of a storage -> the number type of its elements."""
DTYPES = frozenset((*KINDS.values(), "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"))


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: object) -> Tensor:
    if not isinstance(storage, Storage) or not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise DamagedError("a tensor has no storage or no shape")
    return Tensor(storage, offset, size, stride, storage.kind)


def _typed_tensor(storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: object) -> Tensor:
    made = _tensor(storage, offset, size, stride)
    if not isinstance(dtype, Named) or dtype.name.removeprefix("torch.") not in DTYPES:
        raise RefusedError("a tensor of an unknown number type")
    return Tensor(*made.parts[:4], dtype.name.removeprefix("torch."))


def _encoded(text: Any, _how: object = "latin1") -> bytes:
    if not isinstance(text, str):
        raise DamagedError("bytes are not written as text")
    return text.encode("latin1")


def _range(*numbers: Any) -> range:
    if not 1 <= len(numbers) <= 3 or not all(type(n) is int and abs(n) < 2**62 for n in numbers):
        raise DamagedError("a range has no whole numbers")
    return range(*numbers)


def _items(items: Any = ()) -> list[Any]:
    return list(items) if isinstance(items, (list, tuple)) else []


def _size(size: Any = ()) -> tuple[Any, ...]:
    return tuple(_items(size))


_NUMPY = {
    f"{core}.{module}.{name}": made
    for core in ("numpy.core", "numpy._core")
    for module, name, made in (
        ("multiarray", "_reconstruct", _Array),
        ("multiarray", "scalar", _Scalar),
        ("numeric", "_frombuffer", _Buffer),
    )
}
TABLE: dict[str, Callable[..., Any] | None] = {
    "collections.OrderedDict": dict,
    "builtins.range": _range,
    "builtins.xrange": _range,  # its name in the pickles that torch.save writes
    "builtins.set": _items,
    "builtins.frozenset": _items,
    "builtins.bytes": lambda: b"",
    "_codecs.encode": _encoded,
    "torch.Size": _size,
    "torch.device": lambda *_: None,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    **{f"torch.{kind}Storage": None for kind in KINDS},
    "torch.storage.UntypedStorage": None,
    **{f"torch.{dtype}": None for dtype in DTYPES},
    "numpy.ndarray": None,
    "numpy.dtype": _NumpyType,
    **{f"numpy.dtypes.{name}DType": None for name in ("Float64", "Float32", "Int64", "Int32", "Bool")},
    **_NUMPY,
}
"""Every name that a pickle may mention, with what calling it does; None: it may be mentioned only."""


# -- making plain ------------------------------------------------------------------------------------------------------


def plain_data(root: Any, held: int) -> Any:
    """What was unpickled as plain dicts, lists, tuples, numbers, texts, bytes, dense tensors and numpy arrays.

    `held` is the number of bytes of the file.

    Raises `RefusedError` for anything else, and `DamagedError` for what is nested too deeply, contains itself, or stands for
    many more entries than the file has bytes.
    """
    value, entries = _walked(root, {}, 0)
    if entries > held + limit(ENTRIES):
        raise DamagedError(f"its {held} bytes stand for {entries:.3g} entries, written out; {raised()}")
    return value


_OPEN = object()


def _walked(value: Any, seen: dict[int, Any], depth: int) -> tuple[Any, int]:
    """The plain value and its number of entries, shared parts counted wherever they stand."""
    if type(value) in SCALARS:
        return value, 1
    found = seen.get(id(value))
    if found is _OPEN:
        raise DamagedError("a list in it contains itself")
    if found is not None:
        return found[1:]
    if depth > NESTED:
        raise DamagedError(f"it is nested more than {NESTED} deep")
    seen[id(value)] = _OPEN
    if isinstance(value, Made):
        made, entries = value.value()
    elif isinstance(value, range):
        entries = len(value) + 1
        made = value if entries > limit(ENTRIES) else list(value)
    elif type(value) is dict:
        entries = 1
        for key, inside in value.items():
            if type(inside) not in SCALARS:
                value[key], more = _walked(inside, seen, depth + 1)
                entries += more
        made, entries = value, entries + len(value)
    elif type(value) in (list, tuple):
        made, entries = value, len(value) + 1
        if not SCALARS.issuperset(map(type, value)):
            walked = [_walked(inside, seen, depth + 1) for inside in value]
            entries += sum(more for _, more in walked)
            made = tuple(inside for inside, _ in walked) if type(value) is tuple else [inside for inside, _ in walked]
    else:
        raise RefusedError(value.name if isinstance(value, Named) else f"a {type(value).__name__}")
    seen[id(value)] = (value, made, entries)  # the value too: its id is not given to another while it lives
    return made, entries
