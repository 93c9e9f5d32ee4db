"""CUDA tensors without CUDA: shapes and devices are checked, nothing is computed. Forward only.

FakeTensorMode accepts `cuda` in a CPU build, except that brackets, `copy_`, `contiguous` and `~` ask the CUDA runtime for the
current device; here they are spelled out as the operations that they stand for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Inside, `torch.empty(..., device="cuda")` is a fake tensor, and mixing it with a CPU tensor is an error."""
    with FakeTensorMode(allow_non_fake_inputs=False), _Brackets():
        yield


SPELLED_OUT = {Tensor.copy_: torch.ops.aten.copy_.default, Tensor.__invert__: torch.bitwise_not}


class _Brackets(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            view, tensors = _basic(*args)
            return view if tensors is None else torch.ops.aten.index.Tensor(view, tensors)
        if func is Tensor.__setitem__:
            target, index, value = args
            view, tensors = _basic(target, index)
            value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=view.dtype, device=view.device)
            if tensors is None:
                return torch.ops.aten.copy_.default(view, value)
            return torch.ops.aten.index_put_.default(view, tensors, value)
        if func is Tensor.contiguous:
            return args[0] if args[0].is_contiguous() else torch.ops.aten.clone(args[0], memory_format=torch.contiguous_format)
        return SPELLED_OUT.get(func, func)(*args, **(kwargs or {}))


def _basic(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None] | None]:
    """The view that numbers, slices and None make, and the tensors that index what remains."""
    items = list(index) if isinstance(index, tuple) else [index]
    places = sum(
        1 if not isinstance(i, Tensor) or i.dtype != torch.bool else i.dim() for i in items if i is not None and i is not ...
    )
    at = next((n for n, i in enumerate(items) if i is ...), None)
    if at is not None:
        items[at : at + 1] = [slice(None)] * (tensor.dim() - places)
    view, dim, tensors = tensor, 0, []
    for item in items:
        if item is None:
            view = view.unsqueeze(dim)
        elif isinstance(item, int):
            view = view.select(dim, item)
            continue
        elif isinstance(item, slice):
            view = torch.ops.aten.slice.Tensor(view, dim, item.start, item.stop, item.step or 1)
        else:
            tensors += [None] * (dim - len(tensors)) + [item]
        dim += 1
    return view, tensors or None
