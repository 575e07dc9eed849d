# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention: the chunked op, the token recurrence and the decode step in place."""

from typing import Optional

from torch import Tensor

from ._checks import (
    check_bool,
    check_kda_state,
    check_kda_tensors,
    check_no_grad,
    check_state_indices,
    check_writable_state,
    is_int,
    type_name,
)
from ._kda_args import (
    check_offset_extras,
    dense_tokens,
    gate_options,
    intermediate_states,
    layout_of,
    like_query,
    num_sequences,
)
from ._kda_ops import DEFAULT_CHUNK
from ._ops import ops
from ._sdm_ops import dense_rows, note_mutation
from ._transforms import check_transforms, needs_gradient

_CHUNK_SIZES = (16, 32, 64)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: Optional[float] = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    cu_seqlens_cpu: Optional[Tensor] = None,
    cp_context: None = None,
    use_graph: bool = False,
    max_num_seqs: Optional[int] = None,
    *,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    chunk_size: int = DEFAULT_CHUNK,
    transpose_state_layout: Optional[bool] = None,
) -> tuple[Tensor, ...]:
    r"""Kimi delta attention over whole sequences: linear attention with a gated delta rule.

    For every token of every sequence and value head, on its state ``S [K, V]``::

        S    = exp(g)[:, None] * S           each key channel decays by its own gate
        r    = v - S^T k                     what the state does not yet predict for this key
        S    = S + k (beta * r)^T
        out  = scale * S^T q                 after the write

    Value head ``hv`` uses the query and key of head ``hv // (HV / H)``.

    Args:
        q: ``[B, T, H, K]`` floating, queries.
        k: ``[B, T, H, K]`` floating, keys.
        v: ``[B, T, HV, V]`` floating, values; HV is a multiple of H. K and V are multiples of 16 from
            16 to 256.
        g: ``[B, T, HV, K]`` floating, log decays, usually <= 0; raw values with
            ``use_gate_in_kernel``.
        beta: ``[B, T, HV]`` floating, write strengths, usually 0 to 1; raw values with
            ``use_beta_sigmoid_in_kernel``.
        scale: factor of the queries; None is ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]`` float32 or bfloat16 (float64 for float64), the state before
            the first token of each sequence; None is zero.
        output_final_state: whether the states after the last token are returned.
        use_qk_l2norm_in_kernel: multiply each query and key by ``rsqrt(sum of squares + 1e-6)``.
        use_gate_in_kernel: make the log decay from ``z = g + dt_bias``:
            ``-exp(A_log) * softplus(z)``, or with a ``lower_bound``
            ``lower_bound * sigmoid(exp(A_log) * z)``.
        use_beta_sigmoid_in_kernel: put ``beta`` through a sigmoid.
        allow_neg_eigval: twice that sigmoid, so that a write may turn the sign of what it corrects.
        safe_gate: promises that the gate is bounded. Every gate is safe here, so nothing depends on
            it; with ``use_gate_in_kernel`` it needs ``lower_bound``.
        lower_bound: a negative number, chooses the second form of the gate; unused without
            ``use_gate_in_kernel``.
        disable_recompute: keep the state at the start of each chunk for the backward instead of
            computing it again: faster, for more memory.
        return_intermediate_states: return these states as well; not together with gradients.
        state_v_first: all states, given and returned, are ``[.., V, K]``.
        cu_seqlens: ``[N + 1]`` int32 or int64 offsets from 0 to T of N sequences packed one after
            the other into ``B == 1``; empty sequences are legal. None means N = B sequences of T.
        cu_seqlens_cpu: the same offsets on the CPU. Only ``return_intermediate_states`` reads them;
            without them it waits for the device.
        cp_context: None; context parallelism is not served.
        use_graph: no influence: no call waits for the device, so all can be captured.
        max_num_seqs: None, or the most sequences that ``cu_seqlens`` may have.
        A_log: HV elements, ``[HV]`` or with dimensions of 1 around; needed for the first form of
            the gate, factor 1 without it in the second.
        dt_bias: ``[HV * K]`` or ``[HV, K]``, or None for 0.
        chunk_size: tokens worked on at a time: 16, 32 or 64. It changes speed and rounding, never the
            meaning, and sets where the intermediate states are.
        transpose_state_layout: deprecated name of ``state_v_first``.

    The floating dtypes are float32, bfloat16 and float16 in any mixture, or float64 for all. If q, k
    and v differ, they are converted to the widest of the three first. Strides are free; an argument
    whose last dimension is not contiguous (``beta`` excepted) is copied once.

    Returns:
        ``(out, final_state)``: ``out [B, T, HV, V]`` in ``q``'s dtype, ``final_state [N, HV, K, V]`` in
        float32 (float64), or None. Both are contiguous and differentiable. The final state of an
        empty sequence is its initial state. With ``return_intermediate_states``
        ``(out, final_state, h)``, where ``h [B, NT, HV, K, V]`` in ``q``'s dtype has the state before
        each of the NT chunks; packed sequences have their chunks one after the other.

    Effects: none. The arguments are not changed and the results share no memory with them.

    Gradients: ``q``, ``k``, ``v``, ``g``, ``beta``, ``initial_state`` and, with the gate in the
    kernel, ``A_log`` and ``dt_bias``, each in its argument's dtype. Nothing is kept for the backward
    but the arguments; with ``disable_recompute`` ``HV * K * V`` elements for each ``chunk_size``
    tokens besides, in bfloat16 for 16-bit calls. The gradient of a gradient is not implemented;
    ``reference.kda`` has one.

    Precision: gates, strengths, decays and the state are float32 (float64 for float64) whatever the
    dtypes; no decay overflows, however strong. Tolerances: docs/kda.md.

    Determinism: bitwise the same from run to run, for any number of threads, and whatever else is
    in the batch, packed or not. A token's output depends on no bit of later tokens (on CUDA a value
    that is not finite spoils the tokens before it in its chunk as well). Different chunk
    sizes round differently.

    Support: CPU, and CUDA from compute capability 8.0 without float64; anything else raises
    NotImplementedError. Works under ``torch.compile(fullgraph=True)`` with dynamic B and T,
    ``torch.export``, both kinds of activation checkpointing and in CUDA graphs. Autocast changes
    nothing: dtypes are taken as given.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, range or combination. Offsets are looked at on the CPU and outside
            of traces.
        NotImplementedError: ``cp_context`` is given.

    Example:
        >>> B, T, H, K, V = 1, 100, 2, 32, 64
        >>> q, k = torch.randn(B, T, H, K, requires_grad=True), torch.randn(B, T, H, K)
        >>> v, beta = torch.randn(B, T, H, V), torch.rand(B, T, H)
        >>> g = -torch.rand(B, T, H, K)
        >>> out, last = chunk_kda(
        ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> (out.square().sum() + last.sum()).backward()

    """
    func = "chunk_kda"
    check_kda_tensors(func, q, k, v, g, beta)
    for name, value in (
        ("output_final_state", output_final_state),
        ("safe_gate", safe_gate),
        ("disable_recompute", disable_recompute),
        ("return_intermediate_states", return_intermediate_states),
        ("use_graph", use_graph),
    ):
        check_bool(func, name, value)
    if cp_context is not None:
        raise NotImplementedError(
            f"{func}: cp_context must be None (context parallelism is not served), "
            f"got {type(cp_context).__name__}"
        )
    if not is_int(chunk_size):
        raise TypeError(f"{func}: chunk_size must be an int, got {type_name(chunk_size)}")
    if chunk_size not in _CHUNK_SIZES:
        raise ValueError(f"{func}: chunk_size must be 16, 32 or 64, got {chunk_size!r}")
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError(
            f"{func}: lower_bound must be given with safe_gate and use_gate_in_kernel, got None"
        )
    v_first = layout_of(func, state_v_first, transpose_state_layout)
    num = num_sequences(func, q, cu_seqlens)
    check_offset_extras(func, cu_seqlens, cu_seqlens_cpu, max_num_seqs, num, q.shape[1])
    if initial_state is not None:
        check_kda_state(func, "initial_state", initial_state, q, v, num, v_first)
    A_log, dt_bias, options = gate_options(
        func, q, v, A_log, dt_bias, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, v_first,
    )  # fmt: skip
    check_transforms(func, q, k, v, g, beta, A_log, dt_bias, initial_state)
    needs_grad = needs_gradient(q, k, v, g, beta, A_log, dt_bias, initial_state)
    if return_intermediate_states and needs_grad:
        raise ValueError(
            f"{func}: return_intermediate_states must be False where a gradient is asked for, got "
            f"True; call it under torch.no_grad()"
        )
    out, final_state, states = ops.kda_chunk_fwd(
        *dense_tokens(q, k, v, g, beta),
        A_log,
        dt_bias,
        None if initial_state is None else dense_rows(initial_state),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        *options,
        chunk_size,
        output_final_state,
        return_intermediate_states or (disable_recompute and needs_grad),
    )
    out = like_query(out, q)
    final = final_state if output_final_state else None
    if not return_intermediate_states:
        return out, final
    offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    return out, final, intermediate_states(states, q, offsets, chunk_size)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: Optional[float] = None,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    *,
    transpose_state_layout: Optional[bool] = None,
) -> tuple[Tensor, Optional[Tensor]]:
    r"""Kimi delta attention token by token: ``chunk_kda`` for a few tokens.

    The recurrence of ``chunk_kda``, executed literally: T calls with one token, each starting from
    the state that the one before returned, and one call with T tokens give the same bits.

    Args:
        q: ``[B, T, H, K]`` floating.
        k: ``[B, T, H, K]`` floating.
        v: ``[B, T, HV, V]`` floating.
        g: ``[B, T, HV, K]`` floating.
        beta: ``[B, T, HV]`` floating.
        A_log: HV elements, or None.
        dt_bias: ``[HV * K]`` or ``[HV, K]``, or None.
        scale: factor of the queries; None is ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]`` float32 or bfloat16 (float64 for float64); None is zero.
        output_final_state: whether the states after the last token are returned.
        use_qk_l2norm_in_kernel: as in ``chunk_kda``, and so are all that follow.
        use_gate_in_kernel: make the log decay from ``g``, ``dt_bias`` and ``A_log``.
        use_beta_sigmoid_in_kernel: put ``beta`` through a sigmoid.
        allow_neg_eigval: twice that sigmoid.
        lower_bound: a negative number, chooses the bounded form of the gate.
        state_v_first: all states are ``[.., V, K]``.
        cu_seqlens: ``[N + 1]`` offsets of N sequences packed into ``B == 1``, or None (N = B).
        transpose_state_layout: deprecated name of ``state_v_first``.

    Returns:
        ``(out, final_state)``: ``out [B, T, HV, V]`` in ``q``'s dtype, ``final_state [N, HV, K, V]`` in
        float32 (float64), or None. Both are contiguous and differentiable.

    Effects: none.

    Gradients: those of ``chunk_kda``, by its backward; only the arguments are kept.

    Precision: float32 (float64 for float64) inside; each result is rounded once. Tolerances:
    docs/kda.md.

    Determinism: bitwise the same from run to run, for any number of threads and any batch around.

    Support: as ``chunk_kda``. Works under ``torch.compile``; autocast changes nothing.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, range or combination.

    Example:
        >>> q, k = torch.randn(3, 1, 2, 32), torch.randn(3, 1, 2, 32)
        >>> v, g, beta = torch.randn(3, 1, 2, 64), -torch.rand(3, 1, 2, 32), torch.rand(3, 1, 2)
        >>> state = torch.zeros(3, 2, 32, 64)
        >>> out, state = fused_recurrent_kda(
        ...     q, k, v, g, beta, initial_state=state, output_final_state=True
        ... )

    """
    func = "fused_recurrent_kda"
    check_kda_tensors(func, q, k, v, g, beta)
    check_bool(func, "output_final_state", output_final_state)
    v_first = layout_of(func, state_v_first, transpose_state_layout)
    num = num_sequences(func, q, cu_seqlens)
    if initial_state is not None:
        check_kda_state(func, "initial_state", initial_state, q, v, num, v_first)
    A_log, dt_bias, options = gate_options(
        func, q, v, A_log, dt_bias, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, v_first,
    )  # fmt: skip
    check_transforms(func, q, k, v, g, beta, A_log, dt_bias, initial_state)
    out, final_state = ops.kda_recurrent_fwd(
        *dense_tokens(q, k, v, g, beta),
        A_log,
        dt_bias,
        None if initial_state is None else dense_rows(initial_state),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        *options,
        output_final_state,
    )
    return like_query(out, q), final_state if output_final_state else None


def recurrent_kda_(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    scale: Optional[float] = None,
    state_indices: Optional[Tensor] = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: Optional[float] = None,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
) -> Tensor:
    r"""Advance states in place token by token: the decode step of Kimi delta attention.

    The recurrence is that of ``chunk_kda``, executed literally. T >= 1, so that several drafted
    tokens can be verified in one call.

    Args:
        state: ``[N, HV, K, V]`` float32 or bfloat16 (float64 for float64), the state of each
            sequence; with ``state_indices`` ``[pool, HV, K, V]``. Any strides with a contiguous last
            dimension and without overlap, a slice of a larger cache for instance. **Advanced in
            place.**
        q: ``[B, T, H, K]`` floating.
        k: ``[B, T, H, K]`` floating.
        v: ``[B, T, HV, V]`` floating.
        g: ``[B, T, HV, K]`` floating.
        beta: ``[B, T, HV]`` floating.
        A_log: HV elements, or None.
        dt_bias: ``[HV * K]`` or ``[HV, K]``, or None.
        scale: factor of the queries; None is ``K ** -0.5``.
        state_indices: ``[N]`` int32 or int64, the row of ``state`` that each sequence uses, or None
            for row n. ``-1`` skips the sequence: its output is 0, nothing is read or written. Other
            values must differ from each other and lie in ``[0, pool)``; on the CPU and outside of
            traces that is checked.
        use_qk_l2norm_in_kernel: as in ``chunk_kda``, and so are all that follow.
        use_gate_in_kernel: make the log decay from ``g``, ``dt_bias`` and ``A_log``.
        use_beta_sigmoid_in_kernel: put ``beta`` through a sigmoid.
        allow_neg_eigval: twice that sigmoid.
        lower_bound: a negative number, chooses the bounded form of the gate.
        state_v_first: the state is ``[.., V, K]``.
        cu_seqlens: ``[N + 1]`` offsets of N sequences packed into ``B == 1``, or None (N = B).

    Returns:
        ``out [B, T, HV, V]`` in ``q``'s dtype, contiguous, not differentiable.

    Effects: ``state`` changes, and autograd notices if it was saved for a backward. Nothing else
    changes; ``out`` shares no memory with the arguments.

    Gradients: none. RuntimeError if grad mode is on and an argument requires grad.

    Precision: float32 (float64 for float64) inside; the state is rounded to its dtype once a call.
    Tolerances: docs/kda.md.

    Determinism: bitwise the same from run to run, for any number of threads and any batch around;
    with a float32 state the bits of ``fused_recurrent_kda``.

    Support: as ``chunk_kda``. Works under ``torch.compile`` (the schema declares the mutation); autocast changes nothing.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, range or combination.
        RuntimeError: a gradient is asked for.

    Example:
        >>> pool = torch.zeros(8, 2, 32, 64)
        >>> q, k = torch.randn(3, 1, 2, 32), torch.randn(3, 1, 2, 32)
        >>> v, g, beta = torch.randn(3, 1, 2, 64), -torch.rand(3, 1, 2, 32), torch.rand(3, 1, 2)
        >>> rows = torch.tensor([5, -1, 0])
        >>> out = recurrent_kda_(pool, q, k, v, g, beta, state_indices=rows)

    """
    func = "recurrent_kda_"
    check_kda_tensors(func, q, k, v, g, beta)
    check_bool(func, "state_v_first", state_v_first)
    num = num_sequences(func, q, cu_seqlens)
    rows = num if state_indices is None else None
    check_kda_state(func, "state", state, q, v, rows, state_v_first)
    if state_indices is not None:
        check_state_indices(func, state_indices, num, state)
    check_writable_state(func, state)
    A_log, dt_bias, options = gate_options(
        func, q, v, A_log, dt_bias, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first,
    )  # fmt: skip
    check_no_grad(func, state, q, k, v, g, beta, A_log, dt_bias, instead="fused_recurrent_kda")
    out = ops.kda_step_(
        state,
        *dense_tokens(q, k, v, g, beta),
        A_log,
        dt_bias,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        None if state_indices is None else state_indices.contiguous(),
        *options,
    )
    note_mutation(state)
    return like_query(out, q)
