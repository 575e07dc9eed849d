//! @file Checks, allocation and parameters of the KDA ops.
// SPDX-License-Identifier: Apache-2.0
#include "torch-ext/kda_calls.h"

#include <utility>
#include <vector>

#include "torch-ext/results.h"

namespace sdm::ext {

using kda::KdaBeta;
using kda::KdaDims;
using kda::KdaGate;
using kda::KdaOptions;
using kda::KdaStateView;
using kda::KdaTokens;
using kda::KdaView;

namespace {

// The inputs that all ops share, with the sizes found in them.
struct Inputs {
  KdaDims dims;
  KdaOptions options;
  KdaTokens tokens;
  DType compute;  // of states and of the gate's parameters: float64 or float32
  bool v_first;
};

// Head sizes that the kernels are written for.
constexpr int64_t kMaxHeadSize = 256;
constexpr int64_t kHeadStep = 16;

void check_head_size(const char* op, const char* name, int64_t size) {
  check(
      size >= kHeadStep && size <= kMaxHeadSize && size % kHeadStep == 0,
      op,
      ": the head size of ",
      name,
      " must be a multiple of 16 from 16 to 256, got ",
      size
  );
}

// float64 is all or none: a mixture would round silently.
void check_float_kind(const char* op, const char* name, DType dtype, DType compute) {
  check(
      (dtype == DType::kF64) == (compute == DType::kF64),
      op,
      ": ",
      name,
      " and q must both be float64 or both be narrower"
  );
}

KdaView token_view(const char* op, const char* name, const Tensor& t, DType compute) {
  KdaView view{};
  view.data = t.const_data_ptr();
  view.dtype = dtype_of(op, name, t);
  for (int64_t d = 0; d < t.dim(); ++d) {
    view.stride[d] = t.stride(d);
  }
  check_float_kind(op, name, view.dtype, compute);
  return view;
}

// A parameter of the gate, in the compute type; null if it is absent.
const float* gate_parameter(
    const char* op,
    const char* name,
    const std::optional<Tensor>& t,
    std::initializer_list<int64_t> sizes,
    const Inputs& in,
    const Tensor& q
) {
  if (!t.has_value()) {
    return nullptr;
  }
  check_shape(op, name, *t, sizes);
  check_contiguous(op, name, *t);
  check_scalar_type(op, name, *t, scalar_type_of(in.compute));
  check_same_device(op, name, *t, q);
  return static_cast<const float*>(t->const_data_ptr());
}

KdaOptions read_options(const char* op, const KdaOptionArgs& args) {
  check(args.gate >= 0 && args.gate <= 2, op, ": unknown gate ", args.gate);
  check(args.beta_mode >= 0 && args.beta_mode <= 2, op, ": unknown beta_mode ", args.beta_mode);
  return {
      args.scale,
      args.l2norm,
      static_cast<KdaGate>(args.gate),
      args.lower_bound,
      static_cast<KdaBeta>(args.beta_mode)
  };
}

Inputs read_inputs(
    const char* op, const KdaTokenArgs& args, const KdaOptionArgs& options, int64_t chunk_size
) {
  check_dim(op, "q", args.q, 4);
  check_dim(op, "v", args.v, 4);
  Inputs in{};
  KdaDims& d = in.dims;
  d.B = args.q.size(0);
  d.T = args.q.size(1);
  d.H = args.q.size(2);
  d.K = args.q.size(3);
  d.HV = args.v.size(2);
  d.V = args.v.size(3);
  d.C = chunk_size;
  check(d.H >= 1 && d.HV >= 1, op, ": q and v must have at least one head");
  check(d.HV % d.H == 0, op, ": v has ", d.HV, " heads, no multiple of the ", d.H, " of q");
  check_head_size(op, "q", d.K);
  check_head_size(op, "v", d.V);
  check(chunk_size >= 1, op, ": chunk_size must be positive, got ", chunk_size);
  check_shape(op, "k", args.k, {d.B, d.T, d.H, d.K});
  check_shape(op, "v", args.v, {d.B, d.T, d.HV, d.V});
  check_shape(op, "g", args.g, {d.B, d.T, d.HV, d.K});
  check_shape(op, "beta", args.beta, {d.B, d.T, d.HV});
  const std::pair<const char*, const Tensor*> all[] = {
      {"q", &args.q}, {"k", &args.k}, {"v", &args.v}, {"g", &args.g}, {"beta", &args.beta}
  };
  for (const auto& [name, tensor] : all) {
    check_same_device(op, name, *tensor, args.q);
    if (tensor != &args.beta) {
      check_last_dense(op, name, *tensor);
    }
  }
  d.N = num_sequences(op, args.cu_seqlens, d.B);

  const DType dtype = dtype_of(op, "q", args.q);
  in.compute = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  in.v_first = options.v_first;
  in.options = read_options(op, options);
  in.tokens.q = token_view(op, "q", args.q, in.compute);
  in.tokens.k = token_view(op, "k", args.k, in.compute);
  in.tokens.v = token_view(op, "v", args.v, in.compute);
  in.tokens.g = token_view(op, "g", args.g, in.compute);
  in.tokens.beta = token_view(op, "beta", args.beta, in.compute);
  check(
      in.tokens.k.dtype == dtype && in.tokens.v.dtype == dtype,
      op,
      ": q, k and v must have one dtype"
  );
  in.tokens.A_log = gate_parameter(op, "A_log", args.A_log, {d.HV}, in, args.q);
  in.tokens.dt_bias = gate_parameter(op, "dt_bias", args.dt_bias, {d.HV, d.K}, in, args.q);
  check(
      in.options.gate != KdaGate::kActivated ||
          (in.tokens.A_log == nullptr && in.tokens.dt_bias == nullptr),
      op,
      ": A_log and dt_bias belong to a raw gate"
  );
  check(
      in.options.gate != KdaGate::kSoftplus || in.tokens.A_log != nullptr,
      op,
      ": this gate needs A_log"
  );
  return in;
}

std::vector<int64_t> state_shape(const Inputs& in, int64_t rows) {
  const KdaDims& d = in.dims;
  return {rows, d.HV, in.v_first ? d.V : d.K, in.v_first ? d.K : d.V};
}

// [rows, HV, K, V] or, with V first, [rows, HV, V, K].
KdaStateView state_view(const Tensor& t, DType dtype, bool v_first) {
  KdaStateView view{};
  view.data = const_cast<void*>(t.const_data_ptr());
  view.dtype = dtype;
  view.stride[0] = t.stride(0);
  view.stride[1] = t.stride(1);
  view.stride[2] = t.stride(v_first ? 3 : 2);
  view.stride[3] = t.stride(v_first ? 2 : 3);
  return view;
}

KdaStateView read_state(
    const char* op,
    const char* name,
    const std::optional<Tensor>& t,
    int64_t rows,
    const Inputs& in,
    const Tensor& q
) {
  if (!t.has_value()) {
    return {};
  }
  const std::vector<int64_t> wanted = state_shape(in, rows);
  check_shape(op, name, *t, {wanted[0], wanted[1], wanted[2], wanted[3]});
  check_last_dense(op, name, *t);
  check_same_device(op, name, *t, q);
  const DType dtype = dtype_of(op, name, *t);
  check_float_kind(op, name, dtype, in.compute);
  check(dtype != DType::kF16, op, ": ", name, " must be float32 or bfloat16");
  return state_view(*t, dtype, in.v_first);
}

// A state in the compute type that the call makes, or an empty tensor.
Tensor new_state(const Tensor& like, const Inputs& in, bool wanted) {
  const std::vector<int64_t> sizes = wanted ? state_shape(in, in.dims.N) : std::vector<int64_t>{0};
  return new_result(like, sizes, in.compute);
}

DType chunk_states_dtype(const Inputs& in) {
  const DType dtype = in.tokens.q.dtype;
  return dtype == DType::kF16 ? DType::kBf16 : dtype;
}

// Room for any division of the tokens into sequences; see chunk_state_row().
int64_t chunk_state_rows(const KdaDims& d) {
  return d.B * d.T / d.C + d.N;
}

KdaStepCall new_step_call(const KdaTokenArgs& args, const Inputs& in, const KdaStateView& initial) {
  KdaStepCall call{};
  const KdaDims& d = in.dims;
  call.out = new_result(args.q, {d.B, d.T, d.HV, d.V}, in.tokens.q.dtype);
  call.params.dims = d;
  call.params.options = in.options;
  call.params.tokens = in.tokens;
  call.params.initial = initial;
  call.params.out = call.out.mutable_data_ptr();
  return call;
}

}  // namespace

KdaFwdCall prepare_kda_fwd(
    const char* op,
    const KdaTokenArgs& args,
    const KdaOptionArgs& options,
    const std::optional<Tensor>& initial_state,
    int64_t chunk_size,
    bool output_final_state,
    bool output_chunk_states
) {
  const Inputs in = read_inputs(op, args, options, chunk_size);
  const KdaDims& d = in.dims;
  kda::KdaFwdParams p{};
  p.dims = d;
  p.options = in.options;
  p.tokens = in.tokens;
  p.initial = read_state(op, "initial_state", initial_state, d.N, in, args.q);

  Tensor out = new_result(args.q, {d.B, d.T, d.HV, d.V}, in.tokens.q.dtype);
  Tensor final_state = new_state(args.q, in, output_final_state);
  const DType saved_dtype = chunk_states_dtype(in);
  const std::vector<int64_t> saved_shape =
      output_chunk_states ? state_shape(in, chunk_state_rows(d)) : std::vector<int64_t>{0};
  Tensor chunk_states = new_result(args.q, saved_shape, saved_dtype);
  p.out = out.mutable_data_ptr();
  if (output_final_state) {
    p.final_state = state_view(final_state, in.compute, in.v_first);
  }
  if (output_chunk_states) {
    p.chunk_states = {chunk_states.mutable_data_ptr(), saved_dtype, in.v_first};
  }
  return {p, out, final_state, chunk_states};
}

KdaBwdCall prepare_kda_bwd(
    const char* op,
    const Tensor& d_out,
    const std::optional<Tensor>& d_final_state,
    const KdaTokenArgs& args,
    const KdaOptionArgs& options,
    const std::optional<Tensor>& initial_state,
    const std::optional<Tensor>& chunk_states,
    int64_t chunk_size,
    bool need_gate_grad,
    bool need_state_grad
) {
  const Inputs in = read_inputs(op, args, options, chunk_size);
  const KdaDims& d = in.dims;
  kda::KdaBwdParams p{};
  p.dims = d;
  p.options = in.options;
  p.tokens = in.tokens;
  p.initial = read_state(op, "initial_state", initial_state, d.N, in, args.q);
  p.d_final = read_state(op, "d_final_state", d_final_state, d.N, in, args.q);
  check(
      !d_final_state.has_value() || p.d_final.dtype == in.compute,
      op,
      ": d_final_state must have the dtype of the final state"
  );
  check_shape(op, "d_out", d_out, {d.B, d.T, d.HV, d.V});
  check_last_dense(op, "d_out", d_out);
  check_same_device(op, "d_out", d_out, args.q);
  p.d_out = token_view(op, "d_out", d_out, in.compute);
  if (chunk_states.has_value()) {
    const std::vector<int64_t> wanted = state_shape(in, chunk_state_rows(d));
    check_shape(op, "chunk_states", *chunk_states, {wanted[0], wanted[1], wanted[2], wanted[3]});
    check_contiguous(op, "chunk_states", *chunk_states);
    check_scalar_type(op, "chunk_states", *chunk_states, scalar_type_of(chunk_states_dtype(in)));
    check_same_device(op, "chunk_states", *chunk_states, args.q);
    p.chunk_states = {
        const_cast<void*>(chunk_states->const_data_ptr()), chunk_states_dtype(in), in.v_first
    };
  }

  const bool has_A_log = need_gate_grad && args.A_log.has_value();
  const bool has_dt_bias = need_gate_grad && args.dt_bias.has_value();
  const std::vector<int64_t> none{0};
  KdaBwdCall call{};
  call.d_q = new_result(args.q, {d.B, d.T, d.H, d.K}, in.tokens.q.dtype);
  call.d_k = new_result(args.q, {d.B, d.T, d.H, d.K}, in.tokens.k.dtype);
  call.d_v = new_result(args.q, {d.B, d.T, d.HV, d.V}, in.tokens.v.dtype);
  call.d_g = new_result(args.q, {d.B, d.T, d.HV, d.K}, in.tokens.g.dtype);
  call.d_beta = new_result(args.q, {d.B, d.T, d.HV}, in.tokens.beta.dtype);
  call.d_A_log = new_result(args.q, has_A_log ? std::vector<int64_t>{d.HV} : none, in.compute);
  call.d_dt_bias =
      new_result(args.q, has_dt_bias ? std::vector<int64_t>{d.HV, d.K} : none, in.compute);
  call.d_initial = new_state(args.q, in, need_state_grad);
  p.d_q = call.d_q.mutable_data_ptr();
  p.d_k = call.d_k.mutable_data_ptr();
  p.d_v = call.d_v.mutable_data_ptr();
  p.d_g = call.d_g.mutable_data_ptr();
  p.d_beta = call.d_beta.mutable_data_ptr();
  p.d_A_log = has_A_log ? static_cast<float*>(call.d_A_log.mutable_data_ptr()) : nullptr;
  p.d_dt_bias = has_dt_bias ? static_cast<float*>(call.d_dt_bias.mutable_data_ptr()) : nullptr;
  if (need_state_grad) {
    p.d_initial = state_view(call.d_initial, in.compute, in.v_first);
  }
  call.params = p;
  return call;
}

KdaStepCall prepare_kda_recurrent(
    const char* op,
    const KdaTokenArgs& args,
    const KdaOptionArgs& options,
    const std::optional<Tensor>& initial_state,
    bool output_final_state
) {
  const Inputs in = read_inputs(op, args, options, 1);
  const KdaStateView initial =
      read_state(op, "initial_state", initial_state, in.dims.N, in, args.q);
  KdaStepCall call = new_step_call(args, in, initial);
  call.params.pool = in.dims.N;
  call.final_state = new_state(args.q, in, output_final_state);
  if (output_final_state) {
    call.params.final_state = state_view(call.final_state, in.compute, in.v_first);
  }
  return call;
}

KdaStepCall prepare_kda_step(
    const char* op,
    Tensor state,
    const KdaTokenArgs& args,
    const KdaOptionArgs& options,
    const std::optional<Tensor>& state_indices
) {
  const Inputs in = read_inputs(op, args, options, 1);
  check_dim(op, "state", state, 4);
  if (state_indices.has_value()) {
    check_shape(op, "state_indices", *state_indices, {in.dims.N});
    check_contiguous(op, "state_indices", *state_indices);
  }
  const int64_t rows = state_indices.has_value() ? state.size(0) : in.dims.N;
  const KdaStateView pool = read_state(op, "state", state, rows, in, args.q);
  KdaStepCall call = new_step_call(args, in, pool);
  call.params.pool = state.size(0);
  call.params.final_state = pool;
  call.final_state = state;
  return call;
}

}  // namespace sdm::ext
