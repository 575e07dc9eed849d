# SPDX-License-Identifier: Apache-2.0
"""Arguments of the KDA functions: what they leave open is settled here, in the form of the ops."""

import warnings
from typing import Optional

import torch
from torch import Tensor

from ._checks import (
    check_bool,
    check_cu_seqlens,
    check_gate_parameter,
    check_number,
    check_shape,
    check_tensor,
    is_int,
    type_name,
)
from ._kda_ops import (
    BETA_ACTIVATED,
    BETA_SIGMOID,
    BETA_TWO_SIGMOID,
    GATE_ACTIVATED,
    GATE_LOWER_BOUND,
    GATE_SOFTPLUS,
    compute_dtype,
)
from ._sdm_ops import dense_rows


def layout_of(func: str, state_v_first: bool, transpose_state_layout: Optional[bool]) -> bool:
    """Return whether states are V first, from the option and its deprecated name."""
    check_bool(func, "state_v_first", state_v_first)
    if transpose_state_layout is None:
        return state_v_first
    check_bool(func, "transpose_state_layout", transpose_state_layout)
    if state_v_first:
        raise ValueError(f"{func}: transpose_state_layout must not come with state_v_first")
    if not torch.compiler.is_compiling():
        warnings.warn(
            f"{func}: transpose_state_layout is deprecated, use state_v_first",
            FutureWarning,
            stacklevel=3,
        )
    return transpose_state_layout


def num_sequences(func: str, q: Tensor, cu_seqlens: Optional[Tensor]) -> int:
    """Check the offsets and return N."""
    if cu_seqlens is None:
        return q.shape[0]
    check_cu_seqlens(func, cu_seqlens, q, "q")
    return cu_seqlens.shape[0] - 1


def check_offset_extras(
    func: str,
    cu_seqlens: Optional[Tensor],
    cu_seqlens_cpu: Optional[Tensor],
    max_num_seqs: Optional[int],
    num: int,
    length: int,
) -> None:
    """Check what may come with ``cu_seqlens``."""
    if cu_seqlens_cpu is not None:
        if cu_seqlens is None:
            raise ValueError(f"{func}: cu_seqlens_cpu must come with cu_seqlens, got None for it")
        check_tensor(func, "cu_seqlens_cpu", cu_seqlens_cpu)
        if not cu_seqlens_cpu.is_cpu:
            raise ValueError(
                f"{func}: cu_seqlens_cpu must be on the CPU, got {cu_seqlens_cpu.device}"
            )
        check_shape(func, "cu_seqlens_cpu", cu_seqlens_cpu, "[N + 1]", num + 1)
        check_cu_seqlens(
            func, cu_seqlens_cpu, cu_seqlens_cpu.new_empty(1, length), "itself", "cu_seqlens_cpu"
        )
    if max_num_seqs is None:
        return
    if not is_int(max_num_seqs):
        raise TypeError(
            f"{func}: max_num_seqs must be None or an int, got {type_name(max_num_seqs)}"
        )
    if cu_seqlens is not None and num > max_num_seqs:
        raise ValueError(
            f"{func}: cu_seqlens must have at most max_num_seqs = {max_num_seqs} sequences, got {num}"
        )


def gate_options(
    func: str,
    q: Tensor,
    v: Tensor,
    A_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    scale: Optional[float],
    l2norm: bool,
    gate_in_kernel: bool,
    sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    lower_bound: Optional[float],
    v_first: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], tuple]:
    """Check what says how the inputs are activated; return it as the ops take it."""
    for name, value in (
        ("use_qk_l2norm_in_kernel", l2norm),
        ("use_gate_in_kernel", gate_in_kernel),
        ("use_beta_sigmoid_in_kernel", sigmoid_in_kernel),
        ("allow_neg_eigval", allow_neg_eigval),
    ):
        check_bool(func, name, value)
    check_number(func, "scale", scale)
    check_number(func, "lower_bound", lower_bound)
    if allow_neg_eigval and not sigmoid_in_kernel:
        raise ValueError(
            f"{func}: allow_neg_eigval must come with use_beta_sigmoid_in_kernel, got it without"
        )
    gate, bound = GATE_ACTIVATED, 0.0
    if not gate_in_kernel:
        A_log = dt_bias = None
    elif lower_bound is None:
        gate = GATE_SOFTPLUS
        if A_log is None:
            raise ValueError(
                f"{func}: A_log must be given with use_gate_in_kernel and no lower_bound, got None"
            )
    else:
        gate, bound = GATE_LOWER_BOUND, float(lower_bound)
        if not bound < 0:
            raise ValueError(f"{func}: lower_bound must be below 0, got {lower_bound}")
    heads, dim = v.shape[2], q.shape[3]
    compute = compute_dtype(q)
    if A_log is not None:
        check_gate_parameter(func, "A_log", A_log, q, heads, "[HV]")
        A_log = _as(A_log, (heads,), compute)
    if dt_bias is not None:
        check_gate_parameter(func, "dt_bias", dt_bias, q, heads * dim, "[HV * K] or [HV, K]")
        dt_bias = _as(dt_bias, (heads, dim), compute)
    beta_mode = BETA_ACTIVATED
    if sigmoid_in_kernel:
        beta_mode = BETA_TWO_SIGMOID if allow_neg_eigval else BETA_SIGMOID
    scale = dim**-0.5 if scale is None else float(scale)
    return A_log, dt_bias, (scale, l2norm, gate, bound, beta_mode, v_first)


def _as(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return ``x`` dense in a shape and a dtype; by itself if it is: a decode step counts calls."""
    x = x if x.shape == shape else x.reshape(shape)
    x = x if x.dtype == dtype else x.to(dtype)
    return x if x.is_contiguous() else x.contiguous()


def like_query(out: Tensor, q: Tensor) -> Tensor:
    """Return the output in the dtype of the query: others only where q, k and v were mixed."""
    return out if out.dtype == q.dtype else out.to(q.dtype)


def dense_tokens(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Copy what the kernels can't take: other dtypes beside q's, a last dimension with gaps."""
    if not q.dtype == k.dtype == v.dtype:
        widest = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(widest), k.to(widest), v.to(widest)
    return dense_rows(q), dense_rows(k), dense_rows(v), dense_rows(g), beta


def intermediate_states(
    states: Tensor, q: Tensor, offsets: Optional[Tensor], chunk_size: int
) -> Tensor:
    """Pick the rows that chunks have, in their order: ``[B, NT, HV, K, V]`` in q's dtype."""
    batch, length = q.shape[:2]
    if offsets is None:
        chunks = -(-length // chunk_size)
        n = torch.arange(batch, device=q.device).unsqueeze(1)
        # chunk_state_row() of kda_params.h
        rows = n * length // chunk_size + n + torch.arange(chunks, device=q.device)
        shape = (batch, chunks)
    else:
        cuts = offsets.tolist()
        rows = [
            first // chunk_size + n + chunk
            for n, (first, last) in enumerate(zip(cuts, cuts[1:]))
            for chunk in range(-(-(last - first) // chunk_size))
        ]
        rows = torch.tensor(rows, dtype=torch.int64).to(q.device)
        shape = (1, len(rows))
    picked = states.index_select(0, rows.flatten())
    return picked.view(*shape, *states.shape[1:]).to(q.dtype)
