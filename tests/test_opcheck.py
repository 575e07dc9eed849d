# SPDX-License-Identifier: Apache-2.0
"""torch.library.opcheck on every SDM op, and fakes against the real results."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .helpers.cases import FLOATS, ORDER, Case
from .helpers.cases import make as draw
from .helpers.poison import poisoned, transposed

BASE = Case("op", B=2, T=11, H=2, S=9, D=5, W=3, R=2)
CASES = [
    BASE,
    BASE.but(dtype=torch.bfloat16, gate_per_write=True, bank_per_sequence=True),
    BASE.but(lengths=(4, 0, 7), bank_per_sequence=True),
    BASE.but(lengths=(4, 0, 7), write_int=torch.int32, dtype=torch.float64),
]
EMPTY = [BASE.but(T=0), BASE.but(B=0), BASE.but(T=1), BASE.but(lengths=(0, 0))]
SAVE_MODES = range(6)


def make(case, device="cpu", draw=draw):
    """Draw a case; the ops themselves, unlike the functions, have no word for what CUDA lacks."""
    if torch.device(device).type == "cuda" and case.dtype == torch.float64:
        pytest.skip("float64 is for the CPU")
    return draw(case, device)


def forward_args(inputs, *, final=True, save_mode=1, segment=1, chunk=4):
    return (*inputs.args(), inputs.cu_seqlens, chunk, final, save_mode, segment)


def backward_args(ops, inputs, save_mode, *, d_state=True, need_state=True, chunk=4, segment=1):
    inputs = inputs.map(torch.detach)
    out, state, *saved = ops.sdm_chunk_fwd(
        *forward_args(inputs, save_mode=save_mode, chunk=chunk, segment=segment)
    )
    log = save_mode == 2 and inputs.initial_state.is_cuda
    bank = inputs.initial_state if save_mode == 1 or log else state
    x = inputs
    return (
        torch.randn_like(out), torch.randn_like(state) if d_state else None,
        x.write_idx, x.write_val, x.beta, x.g, x.read_idx, x.read_val, bank, x.cu_seqlens, *saved,
        chunk, save_mode, segment, x.initial_state.dim() == 3, need_state,
    )  # fmt: skip


def in_place_args(inputs, *options):
    return (inputs.initial_state.clone(), *inputs.tokens(), *options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("save_mode", SAVE_MODES)
def test_opcheck_forward(ops, device, case, save_mode):
    inputs = make(case, device)
    if save_mode:  # mode 0 keeps nothing and refuses a backward
        inputs = inputs.map(lambda x: x.requires_grad_(), FLOATS)
    final = save_mode % 2 == 0
    args = forward_args(inputs, save_mode=save_mode, final=final)
    torch.library.opcheck(ops.sdm_chunk_fwd.default, args)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("save_mode", [1, 2, 4])
def test_opcheck_backward(ops, device, case, save_mode):
    args = backward_args(ops, make(case, device), save_mode, d_state=save_mode != 2)
    torch.library.opcheck(ops.sdm_chunk_bwd.default, args)


@pytest.mark.parametrize("indices", [None, (2, -1)])
def test_opcheck_in_place(ops, device, indices):
    inputs = make(BASE.but(bank_per_sequence=True), device)
    if indices is not None:
        inputs.initial_state = torch.randn(4, 2, 9, 5, device=device)
        indices = torch.tensor(indices, device=device)
    torch.library.opcheck(ops.sdm_step_.default, in_place_args(inputs, indices))
    torch.library.opcheck(ops.sdm_chunk_.default, in_place_args(inputs, None, indices, 4))


def test_opcheck_in_place_packed(ops, device):
    inputs = make(BASE.but(lengths=(4, 0, 7), bank_per_sequence=True), device)
    args = in_place_args(inputs, inputs.cu_seqlens, None, 4)
    torch.library.opcheck(ops.sdm_chunk_.default, args)


@pytest.mark.parametrize("ids", [[0, 3, 8], [0, -1, 3]])
def test_opcheck_check_indices(ops, device, ids):
    torch.library.opcheck(ops.sdm_check_indices.default, (torch.tensor(ids, device=device), 9))


def same_metadata(real, fake, what):
    for i, (x, y) in enumerate(zip(real, fake)):
        assert x.shape == y.shape, f"{what} output {i}: {tuple(x.shape)}, fake {tuple(y.shape)}"
        assert x.stride() == y.stride(), f"{what} output {i}: {x.stride()}, fake {y.stride()}"
        assert x.dtype == y.dtype, f"{what} output {i}: {x.dtype}, fake {y.dtype}"
        assert x.device == y.device
        assert x.storage_offset() == y.storage_offset()


def compare_with_fake(op, args, what):
    real = op(*args)
    mode = FakeTensorMode()
    fake_args = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
    with mode:
        fake = op(*fake_args)
    single = isinstance(real, torch.Tensor)
    same_metadata(*(([x] if single else x) for x in (real, fake)), what)


@pytest.mark.parametrize("layout", [None, poisoned, transposed])
@pytest.mark.parametrize("case", CASES + EMPTY, ids=lambda case: case.id)
def test_fake_equals_real(ops, device, case, layout):
    inputs = make(case, device)
    if layout is not None:
        inputs = inputs.map(lambda x: layout(x) if x.dim() == 4 else x, ORDER)
    for save_mode in SAVE_MODES:
        for final in (False, True):
            for chunk, segment in ((4, 1), (3, 2), (64, 10)):
                args = forward_args(
                    inputs, save_mode=save_mode, final=final, chunk=chunk, segment=segment
                )
                compare_with_fake(ops.sdm_chunk_fwd, args, f"forward {save_mode} {final} {chunk}")
        if save_mode:
            for need_state in (False, True):
                args = backward_args(ops, inputs, save_mode, need_state=need_state)
                compare_with_fake(ops.sdm_chunk_bwd, args, f"backward {save_mode}")
    if inputs.initial_state.dim() == 4:
        args = in_place_args(inputs, inputs.cu_seqlens, None, 4)
        compare_with_fake(ops.sdm_chunk_, args, "sdm_chunk_")
        if inputs.cu_seqlens is None:
            compare_with_fake(ops.sdm_step_, in_place_args(inputs, None), "sdm_step_")


def test_meta_tensors(sdm):
    inputs = make(BASE).map(lambda x: x.to("meta"))
    out, state = sdm.chunk_sdm(*inputs.args(), output_final_state=True)
    assert out.shape == (2, 11, 2, 5)
    assert state.shape == (2, 2, 9, 5)
    assert out.device.type == state.device.type == "meta"


def test_forward_checks_again(ops, device):
    """A direct call with wrong arguments raises and reads nothing."""
    inputs = make(BASE, device)
    good = forward_args(inputs)
    wrong = {
        "write_idx": (0, inputs.write_idx.short()),
        "write_val": (1, inputs.write_val[..., :-1]),
        "v": (2, inputs.v.transpose(2, 3).contiguous().transpose(2, 3)),
        "beta": (3, inputs.beta[:, :-1]),
        "g": (4, inputs.g.double()),
        "read_idx": (5, inputs.read_idx[:1]),
        "read_val": (6, inputs.read_val.long()),
        "bank": (7, inputs.initial_state[:1]),
        "chunk_size": (9, 0),
        "save_mode": (11, 6),
        "segment_chunks": (12, 0),
    }
    if torch.device(device).type == "cuda":
        wrong["write_val must be on"] = (1, inputs.write_val.cpu())
        wrong["read_val must be on"] = (6, inputs.read_val.cpu())
    for name, (position, value) in wrong.items():
        args = list(good)
        args[position] = value
        with pytest.raises(RuntimeError, match=f"sdm_chunk_fwd: .*{name}"):
            ops.sdm_chunk_fwd(*args)


@pytest.mark.parametrize("save_mode", [1, 2, 4])
def test_backward_checks_again(ops, device, save_mode):
    good = backward_args(ops, make(BASE, device), save_mode)
    d_out, d_state, *_, errors, rows, scales, links = good[:14]
    wrong = {
        "d_out": (0, d_out[..., :-1]),
        "d_final_state": (1, d_state.double()),
        "errors": (10, errors.bfloat16()),
        "saved_rows": (11, rows[:-1]),
        "chunk_size": (14, -1),
        "save_mode": (15, 0),
        "segment_chunks": (16, 0),
    }
    if save_mode == 4:
        wrong["row_scales"] = (12, scales.half())
    if links.numel():
        wrong["row_links"] = (13, links[:-1])
    if torch.device(device).type == "cuda":
        wrong["errors must be on"] = (10, errors.cpu())
        wrong["saved_rows must be on"] = (11, rows.cpu())
    for name, (position, value) in wrong.items():
        args = list(good)
        args[position] = value
        with pytest.raises(RuntimeError, match=f"sdm_chunk_bwd: .*{name}"):
            ops.sdm_chunk_bwd(*args)
