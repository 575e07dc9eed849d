# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments; every message names the function, the argument, the wanted and the given."""

import math
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from ._transforms import check_transforms, transforms_active

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int32, torch.int64)
_AT_MOST_32_BITS = frozenset(FLOATING[:3])


def check_tensor(func: str, name: str, x: object) -> None:
    """Raise TypeError unless ``x`` is a dense tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{func}: {name} must be a Tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"{func}: {name} must be a strided (dense) Tensor, got {x.layout}")


def check_dtype(func: str, name: str, x: Tensor, wanted: Sequence[torch.dtype]) -> None:
    """Raise TypeError unless the dtype of ``x`` is one of ``wanted``."""
    if x.dtype not in wanted:
        names = [_dtype_name(dtype) for dtype in wanted]
        options = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        raise TypeError(f"{func}: {name} must be {options}, got {_dtype_name(x.dtype)}")


def check_shape(func: str, name: str, x: Tensor, letters: str, *wanted: int) -> None:
    """Raise ValueError unless ``x`` has the shape ``wanted``, written as ``letters``."""
    if x.shape != wanted:
        raise ValueError(
            f"{func}: {name} must be {letters} = {_shape(wanted)}, got {_shape(x.shape)}"
        )


def check_dim(func: str, name: str, x: Tensor, letters: str) -> None:
    """Raise ValueError unless ``x`` has as many dimensions as ``letters`` has."""
    if x.dim() != letters.count(",") + 1:
        raise ValueError(f"{func}: {name} must be {letters}, got shape {_shape(x.shape)}")


def check_device(func: str, name: str, x: Tensor, like: Tensor, like_name: str) -> None:
    """Raise ValueError unless ``x`` is on the device of ``like``."""
    if x.device != like.device:
        raise ValueError(
            f"{func}: {name} must be on {like.device} like {like_name}, got {x.device}"
        )


def check_backend(func: str, name: str, x: Tensor) -> None:
    """Raise NotImplementedError where no kernel serves the device or the dtype on it."""
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(f"{func}: {name} must be on the CPU or on CUDA, got {x.device}")
    if x.device.type == "cuda" and x.dtype == torch.float64:
        raise NotImplementedError(
            f"{func}: {name} must be float32, bfloat16 or float16 on CUDA, got float64"
        )


def check_sdm_tensors(
    func: str,
    write_idx: Tensor,
    write_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    read_idx: Tensor,
    read_val: Tensor,
    state: Tensor,
    state_name: str,
) -> None:
    """Check types, dtypes, devices and shapes of the tensors that every SDM function takes.

    Of the state's shape only S is checked.
    """
    # A decode step takes microseconds, so good arguments get through by a handful of comparisons.
    if not torch.compiler.is_compiling() and _sdm_tensors_fit(
        write_idx, write_val, v, beta, g, read_idx, read_val, state
    ):
        return
    indices = {"write_idx": write_idx, "read_idx": read_idx}
    floats = {"write_val": write_val, "beta": beta, "g": g, "read_val": read_val, state_name: state}
    check_tensor(func, "v", v)
    check_dtype(func, "v", v, FLOATING)
    for name, x in indices.items():
        check_tensor(func, name, x)
        check_dtype(func, name, x, INDICES)
    for name, x in floats.items():
        check_tensor(func, name, x)
        check_dtype(func, name, x, FLOATING)
        if (x.dtype == torch.float64) != (v.dtype == torch.float64):
            raise TypeError(
                f"{func}: {name} must be float64 exactly if v is (float64 is all or none), "
                f"got {_dtype_name(x.dtype)} with v {_dtype_name(v.dtype)}"
            )
    check_dim(func, "v", v, "[B, T, H, D]")
    batch, length, heads, dim = v.shape
    if heads < 1 or dim < 1:
        raise ValueError(f"{func}: v must be [B, T, H, D] with H, D >= 1, got {_shape(v.shape)}")
    for name, letter in (("write", "W"), ("read", "R")):
        idx = indices[f"{name}_idx"]
        check_dim(func, f"{name}_idx", idx, f"[B, T, H, {letter}]")
        lanes = idx.shape[-1]
        if lanes < 1:
            raise ValueError(f"{func}: {name}_idx must have {letter} >= 1, got {_shape(idx.shape)}")
        sizes = (batch, length, heads, lanes)
        check_shape(func, f"{name}_idx", idx, f"[B, T, H, {letter}]", *sizes)
        check_shape(func, f"{name}_val", floats[f"{name}_val"], f"[B, T, H, {letter}]", *sizes)
    check_shape(func, "beta", beta, "[B, T, H]", batch, length, heads)
    if g.dim() == 4:
        lanes = write_idx.shape[-1]
        check_shape(func, "g", g, "[B, T, H, W]", batch, length, heads, lanes)
    elif g.dim() == 3:
        check_shape(func, "g", g, "[B, T, H]", batch, length, heads)
    else:
        raise ValueError(f"{func}: g must be [B, T, H] or [B, T, H, W], got {_shape(g.shape)}")
    if state.dim() >= 2 and state.shape[-2] < 1:
        raise ValueError(f"{func}: {state_name} must have S >= 1, got {_shape(state.shape)}")
    for name, x in (*indices.items(), *floats.items()):
        check_device(func, name, x, v, "v")
    check_backend(func, "v", v)


def _sdm_tensors_fit(
    write_idx: Tensor,
    write_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    read_idx: Tensor,
    read_val: Tensor,
    state: Tensor,
) -> bool:
    """Return whether ``check_sdm_tensors`` has nothing to say; may err on the side of False."""
    tensors = (write_idx, write_val, v, beta, g, read_idx, read_val, state)
    try:
        for x in tensors:
            if not x.is_cpu or x.layout is not torch.strided:
                device = v.device
                if device.type != "cuda" or v.dtype == torch.float64:
                    return False
                if any(y.device != device or y.layout is not torch.strided for y in tensors):
                    return False
                break
        shape, writes, reads, gates = v.shape, write_idx.shape, read_idx.shape, beta.shape
        first = v.dtype
        dtypes = (write_val.dtype, beta.dtype, g.dtype, read_val.dtype, state.dtype, first)
        return (
            len(shape) == 4
            and shape[:3] == gates
            and writes[:-1] == gates
            and reads[:-1] == gates
            and write_val.shape == writes
            and read_val.shape == reads
            and (g.shape == gates or g.shape == writes)
            and min(shape[2], shape[3], writes[-1], reads[-1], state.shape[-2]) >= 1
            and write_idx.dtype in INDICES
            and read_idx.dtype in INDICES
            and (
                all(dtype == first for dtype in dtypes)
                if first == torch.float64
                else _AT_MOST_32_BITS.issuperset(dtypes)
            )
            and first in FLOATING
        )
    except (AttributeError, IndexError):  # not a tensor, too few dimensions
        return False


def check_kda_tensors(func: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Check types, dtypes, devices and shapes of the tensors that every KDA function takes."""
    if not torch.compiler.is_compiling() and _kda_tensors_fit(q, k, v, g, beta):
        return
    for name, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items():
        check_tensor(func, name, x)
        check_dtype(func, name, x, FLOATING)
        check_float64(func, name, x, q)
    check_dim(func, "q", q, "[B, T, H, K]")
    check_dim(func, "v", v, "[B, T, HV, V]")
    batch, length, heads, dim = q.shape
    value_heads, columns = v.shape[2:]
    for name, x, letters, size in (("q", q, "H, K", dim), ("v", v, "HV, V", columns)):
        if size % 16 or not 16 <= size <= 256:
            raise ValueError(
                f"{func}: {name} must be [B, T, {letters}] with {letters[-1]} a multiple of 16 from "
                f"16 to 256, got {_shape(x.shape)}"
            )
    if heads < 1 or value_heads < 1 or value_heads % heads:
        raise ValueError(
            f"{func}: v must have a multiple of the {heads} heads of q (HV = n * H), "
            f"got {value_heads}"
        )
    check_shape(func, "k", k, "[B, T, H, K]", batch, length, heads, dim)
    check_shape(func, "v", v, "[B, T, HV, V]", batch, length, value_heads, columns)
    check_shape(func, "g", g, "[B, T, HV, K]", batch, length, value_heads, dim)
    check_shape(func, "beta", beta, "[B, T, HV]", batch, length, value_heads)
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        check_device(func, name, x, q, "q")
    check_backend(func, "q", q)


def _kda_tensors_fit(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> bool:
    """Return whether ``check_kda_tensors`` has nothing to say; may err on the side of False."""
    tensors = (q, k, v, g, beta)
    try:
        device, dtype = q.device, q.dtype
        kind = device.type
        if (kind != "cpu" and kind != "cuda") or (kind == "cuda" and dtype == torch.float64):
            return False
        for x in tensors:
            if x.layout is not torch.strided or x.device != device:
                return False
        batch, length, heads, dim = q.shape
        value_heads, columns = v.shape[2:]
        sizes = (batch, length, value_heads)
        dtypes = {dtype, k.dtype, v.dtype, g.dtype, beta.dtype}
        return (
            k.shape == q.shape
            and v.shape == (*sizes, columns)
            and g.shape == (*sizes, dim)
            and beta.shape == sizes
            and heads >= 1
            and value_heads >= 1
            and value_heads % heads == 0
            and dim % 16 == 0
            and columns % 16 == 0
            and 16 <= dim <= 256
            and 16 <= columns <= 256
            and (_AT_MOST_32_BITS.issuperset(dtypes) or dtypes == {torch.float64})
        )
    except (AttributeError, ValueError):  # not a tensor, too few or too many dimensions
        return False


def check_kda_state(
    func: str, name: str, state: Tensor, q: Tensor, v: Tensor, rows: Optional[int], v_first: bool
) -> None:
    """Check a state ``[N, HV, K, V]``, or with V first ``[N, HV, V, K]``; rows None: any number."""
    check_tensor(func, name, state)
    if q.dtype == torch.float64:
        check_float64(func, name, state, q)
    else:
        check_dtype(func, name, state, (torch.float32, torch.bfloat16))
    letters = f"[{'pool' if rows is None else 'N'}, HV, {'V, K' if v_first else 'K, V'}]"
    check_dim(func, name, state, letters)
    sizes = (v.shape[3], q.shape[3]) if v_first else (q.shape[3], v.shape[3])
    rows = state.shape[0] if rows is None else rows
    check_shape(func, name, state, letters, rows, v.shape[2], *sizes)
    check_device(func, name, state, q, "q")


def check_gate_parameter(func: str, name: str, x: Tensor, q: Tensor, numel: int, letters: str):
    """Check a parameter of the gate: its elements in order, whatever dimensions of 1 are between."""
    check_tensor(func, name, x)
    check_dtype(func, name, x, FLOATING)
    if x.numel() != numel:
        raise ValueError(
            f"{func}: {name} must be {letters} with {numel} elements, got {_shape(x.shape)}"
        )
    check_device(func, name, x, q, "q")


def check_float64(func: str, name: str, x: Tensor, q: Tensor) -> None:
    """Raise TypeError unless ``x`` is float64 exactly if ``q`` is."""
    if (x.dtype == torch.float64) != (q.dtype == torch.float64):
        raise TypeError(
            f"{func}: {name} must be float64 exactly if q is (float64 is all or none), "
            f"got {_dtype_name(x.dtype)} with q {_dtype_name(q.dtype)}"
        )


def check_number(func: str, name: str, value: object) -> None:
    """Raise unless ``value`` is None or a finite number."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{func}: {name} must be None or a float, got {type_name(value)}")
    if not torch.compiler.is_compiling() and not math.isfinite(value):
        raise ValueError(f"{func}: {name} must be finite, got {value}")


def check_chunk_size(func: str, chunk_size: Optional[int]) -> None:
    """Raise unless ``chunk_size`` is None or an int from 1 to 512."""
    if chunk_size is None:
        return
    if not is_int(chunk_size):
        raise TypeError(f"{func}: chunk_size must be None or an int, got {type_name(chunk_size)}")
    if not 1 <= chunk_size <= 512:
        raise ValueError(f"{func}: chunk_size must be from 1 to 512, got {chunk_size}")


def check_bool(func: str, name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{func}: {name} must be a bool, got {type_name(value)}")


def check_choice(func: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless ``value`` is one of the strings ``choices``."""
    options = ", ".join(repr(choice) for choice in choices)
    if not isinstance(value, str):
        raise TypeError(f"{func}: {name} must be one of {options}, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{func}: {name} must be one of {options}, got {value!r}")


def check_cu_seqlens(
    func: str, cu_seqlens: Tensor, like: Tensor, like_name: str, name: str = "cu_seqlens"
) -> None:
    """Check the offsets of packed sequences; their values only where that costs no wait.

    ``like`` is ``[B, T, ...]``. The values are looked at when the tensor is on the CPU and the call
    is not being traced.
    """
    batch, length = like.shape[:2]
    check_tensor(func, name, cu_seqlens)
    check_dtype(func, name, cu_seqlens, INDICES)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(
            f"{func}: {name} must be [N + 1] offsets, got shape {_shape(cu_seqlens.shape)}"
        )
    check_device(func, name, cu_seqlens, like, like_name)
    if batch != 1:
        raise ValueError(f"{func}: {name} must come with B = 1, got B = {batch}")
    if not values_are_at_hand(cu_seqlens):
        return
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != length or any(a > b for a, b in zip(offsets, offsets[1:])):
        raise ValueError(
            f"{func}: {name} must not decrease and go from 0 to T = {length}, "
            f"got {_abbreviated(offsets)}"
        )


def check_state_indices(func: str, state_indices: Tensor, num: int, state: Tensor) -> None:
    """Check the rows of a pool that N sequences use; -1 stands for none.

    The values are looked at when the tensor is on the CPU and the call is not being traced.
    """
    check_tensor(func, "state_indices", state_indices)
    check_dtype(func, "state_indices", state_indices, INDICES)
    check_shape(func, "state_indices", state_indices, "[N]", num)
    check_device(func, "state_indices", state_indices, state, "state")
    if not values_are_at_hand(state_indices):
        return
    pool = state.shape[0]
    rows = state_indices.tolist()
    live = [row for row in rows if row != -1]
    if any(not 0 <= row < pool for row in live):
        raise ValueError(
            f"{func}: state_indices must be -1 or from 0 to {pool - 1} (state has {pool} rows), "
            f"got {_abbreviated(rows)}"
        )
    if len(set(live)) != len(live):
        raise ValueError(
            f"{func}: state_indices must name each row of state once, got {_abbreviated(rows)}"
        )


def check_writable_state(func: str, state: Tensor) -> None:
    """Raise unless ``state`` can be updated in place: last dimension dense, no overlap."""
    if state.is_contiguous():
        return
    if state.shape[-1] > 1 and state.stride(-1) != 1:
        raise ValueError(
            f"{func}: state must have a contiguous last dimension, got strides {state.stride()}"
        )
    if torch.compiler.is_compiling() or state.numel() == 0:
        return
    extent = 1
    for stride, size in sorted(zip(state.stride(), state.shape)):
        if size > 1:
            if stride < extent:
                raise ValueError(
                    f"{func}: state must not overlap itself, got shape {_shape(state.shape)} "
                    f"with strides {state.stride()}"
                )
            extent = stride * (size - 1) + extent


def check_no_grad(func: str, *tensors: Optional[Tensor], instead: str = "chunk_sdm") -> None:
    """Raise if a derivative of an in-place function is asked for."""
    check_transforms(func, *tensors)
    if not torch.is_grad_enabled():
        return
    for x in tensors:
        if x is not None and x.requires_grad:
            raise RuntimeError(
                f"{func}: changes state in place and has no backward, but an argument requires "
                f"grad; call it under torch.no_grad(), or use {instead}"
            )


def values_are_at_hand(x: Tensor) -> bool:
    """Whether reading the values of ``x`` neither waits for a device nor breaks a trace."""
    if x.device.type != "cpu" or type(x) is not Tensor:
        return False
    return not torch.compiler.is_compiling() and not transforms_active()


def is_int(value: object) -> bool:
    """Return whether ``value`` is an int, True and False excepted; tracing has ints of its own."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def type_name(value: object) -> str:
    """Return the name of a type, with its module where it is not Python's: numpy has a bool too."""
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def _shape(sizes: Sequence[int]) -> str:
    return "[" + ", ".join(str(size) for size in sizes) + "]"


def _abbreviated(values: Sequence[int], limit: int = 16) -> str:
    if len(values) <= limit:
        return str(list(values))
    return str(list(values[:limit]))[:-1] + f", ... {len(values) - limit} more]"
