//! @file Checks, allocation and parameters of the SDM ops.
// SPDX-License-Identifier: Apache-2.0
#include "torch-ext/sdm_calls.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "sdm_kernels/sdm/sdm_plan.h"
#include "torch-ext/results.h"

namespace sdm::ext {
namespace {

// The inputs that all ops share, with the sizes found in them.
struct Inputs {
  SdmDims dims;
  SdmTokens tokens;
  DType bank_dtype;
};

void copy_strides(const Tensor& t, int64_t dims, int64_t (&strides)[4]) {
  for (int64_t d = 0; d < 4; ++d) {
    strides[d] = d < dims ? t.stride(d) : 0;
  }
}

FloatView float_view(const char* op, const char* name, const Tensor& t) {
  FloatView view{};
  view.data = t.const_data_ptr();
  view.dtype = dtype_of(op, name, t);
  copy_strides(t, t.dim(), view.stride);
  return view;
}

IndexView index_view(const char* op, const char* name, const Tensor& t) {
  IndexView view{};
  view.data = t.const_data_ptr();
  view.is_int64 = is_int64(op, name, t);
  copy_strides(t, t.dim(), view.stride);
  return view;
}

// [N, H, S, D], or [H, S, D] shared by all sequences.
BankView bank_view(const Tensor& t, bool shared) {
  BankView view{};
  view.data = const_cast<void*>(t.const_data_ptr());
  const int64_t first = shared ? 0 : 1;
  view.stride[0] = shared ? 0 : t.stride(0);
  view.stride[1] = t.stride(first);
  view.stride[2] = t.stride(first + 1);
  return view;
}

// float64 is all or none: a mixture would round silently.
void check_float_kind(const char* op, const char* name, DType dtype, DType bank) {
  check(
      (dtype == DType::kF64) == (bank == DType::kF64),
      op,
      ": ",
      name,
      " and the bank must both be float64 or both be narrower"
  );
}

// Everything but the rows; D comes from the bank.
Inputs read_inputs(
    const char* op, const SdmTokenArgs& args, const Tensor& bank, int64_t chunk_size
) {
  check_dim(op, "write_idx", args.write_idx, 4);
  check_dim(op, "read_idx", args.read_idx, 4);
  check(bank.dim() == 3 || bank.dim() == 4, op, ": the bank must have 3 or 4 dimensions");
  Inputs in{};
  SdmDims& d = in.dims;
  d.B = args.write_idx.size(0);
  d.T = args.write_idx.size(1);
  d.H = args.write_idx.size(2);
  d.W = args.write_idx.size(3);
  d.R = args.read_idx.size(3);
  d.S = bank.size(-2);
  d.D = bank.size(-1);
  d.C = chunk_size;
  d.N = d.B;
  d.gate_per_write = args.g.dim() == 4;
  check(d.W >= 1 && d.R >= 1 && d.S >= 1 && d.D >= 1, op, ": W, R, S and D must be positive");
  check(chunk_size >= 1, op, ": chunk_size must be positive, got ", chunk_size);
  check_shape(op, "write_val", args.write_val, {d.B, d.T, d.H, d.W});
  check_shape(op, "read_idx", args.read_idx, {d.B, d.T, d.H, d.R});
  check_shape(op, "read_val", args.read_val, {d.B, d.T, d.H, d.R});
  check_shape(op, "beta", args.beta, {d.B, d.T, d.H});
  if (d.gate_per_write) {
    check_shape(op, "g", args.g, {d.B, d.T, d.H, d.W});
  } else {
    check_shape(op, "g", args.g, {d.B, d.T, d.H});
  }
  check(bank.size(-3) == d.H, op, ": the bank must have ", d.H, " heads, got ", bank.size(-3));
  check_last_dense(op, "the bank", bank);
  const std::pair<const char*, const Tensor*> all[] = {
      {"write_val", &args.write_val},
      {"beta", &args.beta},
      {"g", &args.g},
      {"read_idx", &args.read_idx},
      {"read_val", &args.read_val},
      {"the bank", &bank}
  };
  for (const auto& [name, tensor] : all) {
    check_same_device(op, name, *tensor, args.write_idx);
  }

  in.bank_dtype = dtype_of(op, "the bank", bank);
  in.tokens.write_idx = index_view(op, "write_idx", args.write_idx);
  in.tokens.read_idx = index_view(op, "read_idx", args.read_idx);
  in.tokens.write_val = float_view(op, "write_val", args.write_val);
  in.tokens.read_val = float_view(op, "read_val", args.read_val);
  in.tokens.beta = float_view(op, "beta", args.beta);
  in.tokens.g = float_view(op, "g", args.g);
  check_float_kind(op, "write_val", in.tokens.write_val.dtype, in.bank_dtype);
  check_float_kind(op, "read_val", in.tokens.read_val.dtype, in.bank_dtype);
  check_float_kind(op, "beta", in.tokens.beta.dtype, in.bank_dtype);
  check_float_kind(op, "g", in.tokens.g.dtype, in.bank_dtype);
  return in;
}

// A row of D values a token: v, or the gradient of the output.
FloatView read_token_rows(
    const char* op, const char* name, const SdmTokenArgs& args, const Inputs& in
) {
  const SdmDims& d = in.dims;
  const Tensor& t = args.rows;
  check_shape(op, name, t, {d.B, d.T, d.H, d.D});
  check_last_dense(op, name, t);
  check_same_device(op, name, t, args.write_idx);
  const FloatView view = float_view(op, name, t);
  check_float_kind(op, name, view.dtype, in.bank_dtype);
  return view;
}

SdmSave read_save_mode(const char* op, const SdmSaveArgs& save) {
  check(save.mode >= 0 && save.mode <= 5, op, ": unknown save_mode ", save.mode);
  check(
      save.segment_chunks >= 1, op, ": segment_chunks must be positive, got ", save.segment_chunks
  );
  return static_cast<SdmSave>(save.mode);
}

ScalarType saved_row_type(SdmSave mode, DType bank) {
  switch (mode) {
    case SdmSave::kBf16:
      return ScalarType::BFloat16;
    case SdmSave::kFp8:
    case SdmSave::kInt4:
      return ScalarType::Byte;
    default:
      return scalar_type_of(bank);
  }
}

// Shape of the saved rows or bank checkpoints; as the fake implementation in _sdm_ops.py has it.
std::vector<int64_t> saved_rows_shape(
    const SdmDims& d, SdmSave mode, int64_t segment_chunks, bool packed
) {
  if (mode == SdmSave::kNone) {
    return {0};
  }
  const int64_t chunks = ceil_div(d.T, d.C);
  if (mode == SdmSave::kReplay) {
    const int64_t checkpoints =
        packed ? d.T / (segment_chunks * d.C) : d.B * num_checkpoints(chunks, segment_chunks);
    return {checkpoints, d.H, d.S, d.D};
  }
  const int64_t per_chunk = rows_of_chunk(d, d.C);
  const int64_t rows = packed ? std::min(d.T * d.W, (d.T / d.C + d.N) * per_chunk)
                              : d.B * std::min(d.T * d.W, chunks * per_chunk);
  return {d.H, rows, mode == SdmSave::kInt4 ? ceil_div(d.D, 2) : d.D};
}

// The links of a log's rows, and the last row of every slot (cuda/sdm_sources.h).
int64_t num_row_links(
    const SdmDims& d, const SdmSaveArgs& save, const std::vector<int64_t>& saved_shape
) {
  return save.log() ? d.H * (saved_shape[1] + d.N * d.S) : 0;
}

}  // namespace

SdmFwdCall prepare_sdm_fwd(
    const char* op,
    const SdmTokenArgs& tokens,
    const Tensor& initial_state,
    int64_t chunk_size,
    bool output_final_state,
    const SdmSaveArgs& save
) {
  Inputs in = read_inputs(op, tokens, initial_state, chunk_size);
  const Tensor& v = tokens.rows;
  in.tokens.v = read_token_rows(op, "v", tokens, in);
  SdmDims& d = in.dims;
  d.N = num_sequences(op, tokens.cu_seqlens, d.B);
  const bool shared = initial_state.dim() == 3;
  check(
      shared || initial_state.size(0) == d.N, op, ": initial_state must have ", d.N, " sequences"
  );
  const SdmSave mode = read_save_mode(op, save);
  const DType compute = in.bank_dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const auto saved_shape =
      saved_rows_shape(d, mode, save.segment_chunks, tokens.cu_seqlens.has_value());

  check(
      !save.log() || saved_shape[1] < (int64_t{1} << 30) - 1,
      op,
      ": too many rows to keep, ",
      saved_shape[1],
      " a head"
  );
  const bool wants_bank = output_final_state || (saves_rows(mode) && !save.log());
  const bool scaled = mode == SdmSave::kFp8 || mode == SdmSave::kInt4;
  Tensor out = new_result(v, {d.B, d.T, d.H, d.D}, in.tokens.v.dtype);
  Tensor final_state = wants_bank ? new_result(v, {d.N, d.H, d.S, d.D}, in.bank_dtype)
                                  : new_result(v, {0}, in.bank_dtype);
  Tensor errors = mode != SdmSave::kNone ? new_result(v, {d.B, d.T, d.H, d.D}, compute)
                                         : new_result(v, {0}, compute);
  Tensor saved_rows = new_result(v, saved_shape, saved_row_type(mode, in.bank_dtype));
  Tensor row_scales = scaled ? new_result(v, {saved_shape[0], saved_shape[1]}, DType::kF32)
                             : new_result(v, {0}, DType::kF32);
  Tensor row_links = new_empty(v, {num_row_links(d, save, saved_shape)}, ScalarType::Int);

  SdmFwdParams p{};
  p.dims = d;
  p.tokens = in.tokens;
  p.bank_dtype = in.bank_dtype;
  p.initial = bank_view(initial_state, shared);
  if (wants_bank) {
    p.bank = bank_view(final_state, false);
  }
  p.out = out.mutable_data_ptr();
  p.saved.mode = mode;
  p.saved.segment_chunks = save.segment_chunks;
  if (mode != SdmSave::kNone) {
    p.saved.errors = errors.mutable_data_ptr();
    p.saved.rows = saved_rows.mutable_data_ptr();
    p.saved.rows_per_head = saves_rows(mode) ? saved_shape[1] : 0;
    p.saved.checkpoints = mode == SdmSave::kReplay ? saved_shape[0] : 0;
  }
  p.saved.scales = scaled ? static_cast<float*>(row_scales.mutable_data_ptr()) : nullptr;
  p.saved.links = save.log() ? static_cast<int32_t*>(row_links.mutable_data_ptr()) : nullptr;
  return {p, out, final_state, errors, saved_rows, row_scales, row_links};
}

SdmBwdCall prepare_sdm_bwd(
    const char* op,
    const SdmTokenArgs& tokens,
    const std::optional<Tensor>& d_final_state,
    const Tensor& bank,
    const SdmSavedArgs& saved,
    int64_t chunk_size,
    const SdmSaveArgs& save,
    bool shared_bank,
    bool need_state_grad
) {
  Inputs in = read_inputs(op, tokens, bank, chunk_size);
  SdmDims& d = in.dims;
  d.N = num_sequences(op, tokens.cu_seqlens, d.B);
  const SdmSave mode = read_save_mode(op, save);
  check(mode != SdmSave::kNone, op, ": save_mode 0 keeps nothing to differentiate from");
  const bool one_bank = bank.dim() == 3;
  check(
      one_bank ? (mode == SdmSave::kReplay || save.log()) && shared_bank : bank.size(0) == d.N,
      op,
      ": the bank does not fit save_mode and shared_bank"
  );
  const DType compute = in.bank_dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const auto saved_shape =
      saved_rows_shape(d, mode, save.segment_chunks, tokens.cu_seqlens.has_value());
  const bool scaled = mode == SdmSave::kFp8 || mode == SdmSave::kInt4;
  check_shape(op, "errors", saved.errors, {d.B, d.T, d.H, d.D});
  check_scalar_type(op, "errors", saved.errors, scalar_type_of(compute));
  check_contiguous(op, "errors", saved.errors);
  check_same_device(op, "errors", saved.errors, bank);
  check_scalar_type(op, "saved_rows", saved.rows, saved_row_type(mode, in.bank_dtype));
  check_contiguous(op, "saved_rows", saved.rows);
  check_same_device(op, "saved_rows", saved.rows, bank);
  int64_t wanted_elements = 1;
  for (const int64_t size : saved_shape) {
    wanted_elements *= size;
  }
  check(saved.rows.numel() == wanted_elements, op, ": saved_rows has the wrong size");
  if (scaled) {
    check_shape(op, "row_scales", saved.row_scales, {saved_shape[0], saved_shape[1]});
    check_scalar_type(op, "row_scales", saved.row_scales, ScalarType::Float);
    check_contiguous(op, "row_scales", saved.row_scales);
    check_same_device(op, "row_scales", saved.row_scales, bank);
  }
  if (save.log()) {
    check_shape(op, "row_links", saved.row_links, {num_row_links(d, save, saved_shape)});
    check_scalar_type(op, "row_links", saved.row_links, ScalarType::Int);
    check_contiguous(op, "row_links", saved.row_links);
    check_same_device(op, "row_links", saved.row_links, bank);
  }

  SdmBwdParams p{};
  p.d_out = read_token_rows(op, "d_out", tokens, in);
  p.dims = d;
  p.tokens = in.tokens;
  p.bank_dtype = in.bank_dtype;
  p.bank = bank_view(bank, one_bank);
  if (d_final_state.has_value()) {
    check_shape(op, "d_final_state", *d_final_state, {d.N, d.H, d.S, d.D});
    check_last_dense(op, "d_final_state", *d_final_state);
    check_same_device(op, "d_final_state", *d_final_state, bank);
    check_scalar_type(op, "d_final_state", *d_final_state, scalar_type_of(in.bank_dtype));
    p.d_final = bank_view(*d_final_state, false);
  }
  p.saved.mode = mode;
  p.saved.segment_chunks = save.segment_chunks;
  p.saved.errors = const_cast<void*>(saved.errors.const_data_ptr());
  p.saved.rows = const_cast<void*>(saved.rows.const_data_ptr());
  p.saved.rows_per_head = saves_rows(mode) ? saved_shape[1] : 0;
  if (scaled) {
    p.saved.scales =
        const_cast<float*>(static_cast<const float*>(saved.row_scales.const_data_ptr()));
  }
  if (save.log()) {
    p.saved.links =
        const_cast<int32_t*>(static_cast<const int32_t*>(saved.row_links.const_data_ptr()));
  }
  p.shared_bank = shared_bank;

  Tensor d_write_val = new_result(bank, {d.B, d.T, d.H, d.W}, in.tokens.write_val.dtype);
  Tensor d_v = new_result(bank, {d.B, d.T, d.H, d.D}, p.d_out.dtype);
  Tensor d_beta = new_result(bank, {d.B, d.T, d.H}, in.tokens.beta.dtype);
  Tensor d_g = d.gate_per_write ? new_result(bank, {d.B, d.T, d.H, d.W}, in.tokens.g.dtype)
                                : new_result(bank, {d.B, d.T, d.H}, in.tokens.g.dtype);
  Tensor d_read_val = new_result(bank, {d.B, d.T, d.H, d.R}, in.tokens.read_val.dtype);
  Tensor d_initial = !need_state_grad ? new_result(bank, {0}, in.bank_dtype)
                     : shared_bank    ? new_result(bank, {d.H, d.S, d.D}, in.bank_dtype)
                                      : new_result(bank, {d.N, d.H, d.S, d.D}, in.bank_dtype);
  p.d_write_val = d_write_val.mutable_data_ptr();
  p.d_v = d_v.mutable_data_ptr();
  p.d_beta = d_beta.mutable_data_ptr();
  p.d_g = d_g.mutable_data_ptr();
  p.d_read_val = d_read_val.mutable_data_ptr();
  p.d_initial = need_state_grad ? d_initial.mutable_data_ptr() : nullptr;
  return {p, d_write_val, d_v, d_beta, d_g, d_read_val, d_initial};
}

SdmInPlaceCall prepare_sdm_in_place(
    const char* op,
    Tensor state,
    const SdmTokenArgs& tokens,
    const std::optional<Tensor>& state_indices,
    int64_t chunk_size
) {
  check_dim(op, "state", state, 4);
  Inputs in = read_inputs(op, tokens, state, chunk_size);
  const Tensor& v = tokens.rows;
  in.tokens.v = read_token_rows(op, "v", tokens, in);
  SdmDims& d = in.dims;
  d.N = num_sequences(op, tokens.cu_seqlens, d.B);
  if (state_indices.has_value()) {
    check_shape(op, "state_indices", *state_indices, {d.N});
    check_contiguous(op, "state_indices", *state_indices);
  } else {
    check(state.size(0) == d.N, op, ": state must have ", d.N, " rows, got ", state.size(0));
  }

  Tensor out = new_result(v, {d.B, d.T, d.H, d.D}, in.tokens.v.dtype);
  SdmFwdParams p{};
  p.dims = d;
  p.tokens = in.tokens;
  p.bank_dtype = in.bank_dtype;
  p.bank = bank_view(state, false);
  p.out = out.mutable_data_ptr();
  p.saved.segment_chunks = 1;
  return {p, out};
}

}  // namespace sdm::ext
