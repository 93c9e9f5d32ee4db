"""Pickles as plain data: one reader for torch files and SkyRL's dumps, under which no pickle can call or change anything.

A pickle is a program. Here its names lead to the table of `pickled`, an object made anew for each mention; it can build
dicts, lists, numbers, texts, bytes, tensors and numpy arrays, and set the state of what it has itself made. Everything else
is refused by name. Tensors of any device become dense tensors in this process's memory.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, ClassVar

from aggcli.rollouts.pickled import KINDS, TABLE, DamagedError, Made, Named, RefusedError, Storage

KEYS = (str, int, float, bool, type(None), bytes)
"""What a dict's keys may be: hashing deeper ones can overrun the stack."""


_Python: Any = pickle._Unpickler  # pyright: ignore[reportAttributeAccessIssue]  # the reader in Python


class Bounded:
    """A file of `size` bytes to read from, which never sets memory aside for more bytes than it has left."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self.readline = file.readline

    def read(self, count: int) -> bytes:
        return self._file.read(min(count, max(self._size - self._file.tell(), 0)))


class Unpickler(_Python):
    """`pickle`'s reader in Python (its memo is a dict, so an index in the file allocates nothing), without what can act.

    `more` names what else may be mentioned, as `TABLE` does: a function from a dotted name to what calling it does, or None.
    """

    def __init__(
        self,
        file: Any,
        storage: Callable[[str, str, int], Storage] | None = None,
        more: Callable[[str], Callable[..., Any] | None] = lambda name: None,
    ) -> None:
        super().__init__(file, encoding="utf-8")
        self._storage, self._more = storage, more

    def find_class(self, module: str, name: str) -> Named:
        dotted = f"{module}.{name}".replace("__builtin__.", "builtins.", 1)
        if dotted in TABLE:
            return Named(dotted, TABLE[dotted])
        made = self._more(dotted)
        if made is None:
            raise RefusedError(dotted)
        return Named(dotted, made)

    def persistent_load(self, pid: Any) -> Storage:
        if self._storage is None or not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise RefusedError("a reference to something outside itself")
        _, kind, key, _, elements = pid[:5]
        name = kind.name if isinstance(kind, Named) else ""
        dtype = KINDS.get(name.removeprefix("torch.").removesuffix("Storage"))
        if name == "torch.storage.UntypedStorage":
            dtype = "uint8"
        if dtype is None or not isinstance(key, str) or type(elements) is not int or elements < 0:
            raise RefusedError(f"a storage of {name or 'an unknown kind'}")
        return self._storage(key, dtype, elements)

    # -- opcodes that act, in the form in which they cannot -------------------------------------------------------------

    def _call(self, named: Any, arguments: Any) -> Any:
        if not isinstance(named, Named) or named.call is None or not isinstance(arguments, tuple):
            raise RefusedError(f"a call of {named.name if isinstance(named, Named) else type(named).__name__}")
        try:
            return named.call(*arguments)
        except TypeError:
            raise DamagedError(f"{named.name} is called with other arguments than its own") from None

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments)

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments)

    def load_build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if type(made) is dict and not state:
            return  # an OrderedDict without attributes of its own
        if not isinstance(made, Made):
            raise RefusedError(f"a state for {made.name if isinstance(made, Named) else type(made).__name__}")
        made.set_state(state)

    def _set(self, place: Any, items: list[Any]) -> None:
        if not isinstance(place, dict):
            raise DamagedError("items are set on what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in KEYS:
                raise RefusedError(f"a dict with {type(key).__name__} keys")
            place[key] = value

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._set(self.stack[-1], items)

    def load_dict(self) -> None:
        items = self.pop_mark()
        made: dict[Any, Any] = {}
        self._set(made, items)
        self.append(made)

    def load_append(self) -> None:
        value = self.stack.pop()
        self._extend([value])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise DamagedError("items are added to what is no list")
        self.stack[-1].extend(items)

    def load_empty_set(self) -> None:
        self.append([])

    def load_frozenset(self) -> None:
        self.append(self.pop_mark())

    def load_refused(self) -> None:
        raise RefusedError("an instruction that plain data does not need")

    dispatch: ClassVar[dict[int, Any]] = {
        **_Python.dispatch,
        **dict.fromkeys(
            (op[0] for op in (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID)),
            load_refused,
        ),
        **dict.fromkeys((op[0] for op in (pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)), load_refused),
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.EMPTY_SET[0]: load_empty_set,
        pickle.ADDITEMS[0]: load_appends,
        pickle.FROZENSET[0]: load_frozenset,
    }


def legacy_storages(file: Any, storages: Mapping[str, Storage], keys: Any) -> None:
    """Fill the storages that follow the pickles of torch's older format, in the order of `keys`."""
    if not isinstance(keys, list):
        raise DamagedError("the list of its storages is missing")
    import torch

    for key in keys:
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None:
            raise DamagedError("it lists a storage that nothing uses")
        (elements,) = struct.unpack("<q", file.read(8))
        size = elements * getattr(torch, storage.kind).itemsize
        data = file.read(max(size, 0))
        if len(data) != size:
            raise DamagedError("it ends within a tensor")
        storage.data = bytearray(data)
