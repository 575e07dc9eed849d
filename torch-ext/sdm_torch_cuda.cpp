//! @file Sparse delta memory for torch on CUDA: the tensors' device, its current stream, a
//! workspace from torch's allocator.
// SPDX-License-Identifier: Apache-2.0
#ifdef CUDA_KERNEL
#include "sdm_kernels/sdm/cuda/sdm_cuda.h"
#include "torch-ext/results_cuda.h"
#include "torch-ext/sdm_calls.h"
#include "torch-ext/torch_binding.h"

namespace sdm::ext {
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sdm_chunk_fwd_cuda(
    const Tensor& write_idx,
    const Tensor& write_val,
    const Tensor& v,
    const Tensor& beta,
    const Tensor& g,
    const Tensor& read_idx,
    const Tensor& read_val,
    const Tensor& initial_state,
    const std::optional<Tensor>& cu_seqlens,
    int64_t chunk_size,
    bool output_final_state,
    int64_t save_mode,
    int64_t segment_chunks
) {
  const char* op = "sdm_chunk_fwd";
  const DeviceGuard guard(v.get_device_index());
  SdmFwdCall call = prepare_sdm_fwd(
      op,
      write_idx,
      write_val,
      v,
      beta,
      g,
      read_idx,
      read_val,
      initial_state,
      cu_seqlens,
      chunk_size,
      output_final_state,
      save_mode,
      segment_chunks
  );
  const SdmCudaFwdParams params{
      call.params,
      device_integers(op, "cu_seqlens", cu_seqlens, v),
      {nullptr, false},
      call.params.dims.N
  };
  size_t bytes = 0;
  check_cuda(op, sdm_fwd_cuda_workspace(params, &bytes));
  Tensor workspace = new_workspace(v, bytes);
  check_cuda(op, launch_sdm_fwd(params, workspace.mutable_data_ptr(), current_stream(v)));
  return call.results();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> sdm_chunk_bwd_cuda(
    const Tensor& d_out,
    const std::optional<Tensor>& d_final_state,
    const Tensor& write_idx,
    const Tensor& write_val,
    const Tensor& beta,
    const Tensor& g,
    const Tensor& read_idx,
    const Tensor& read_val,
    const Tensor& bank,
    const std::optional<Tensor>& cu_seqlens,
    const Tensor& errors,
    const Tensor& saved_rows,
    const Tensor& row_scales,
    int64_t chunk_size,
    int64_t save_mode,
    int64_t segment_chunks,
    bool shared_bank,
    bool need_state_grad
) {
  const char* op = "sdm_chunk_bwd";
  const DeviceGuard guard(d_out.get_device_index());
  SdmBwdCall call = prepare_sdm_bwd(
      op,
      d_out,
      d_final_state,
      write_idx,
      write_val,
      beta,
      g,
      read_idx,
      read_val,
      bank,
      cu_seqlens,
      errors,
      saved_rows,
      row_scales,
      chunk_size,
      save_mode,
      segment_chunks,
      shared_bank,
      need_state_grad
  );
  const SdmCudaBwdParams params{call.params, device_integers(op, "cu_seqlens", cu_seqlens, d_out)};
  size_t bytes = 0;
  check_cuda(op, sdm_bwd_cuda_workspace(params, &bytes));
  Tensor workspace = new_workspace(d_out, bytes);
  check_cuda(op, launch_sdm_bwd(params, workspace.mutable_data_ptr(), current_stream(d_out)));
  return call.results();
}

Tensor sdm_chunk_cuda(
    Tensor state,
    const Tensor& write_idx,
    const Tensor& write_val,
    const Tensor& v,
    const Tensor& beta,
    const Tensor& g,
    const Tensor& read_idx,
    const Tensor& read_val,
    const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& state_indices,
    int64_t chunk_size
) {
  const char* op = "sdm_chunk_";
  const DeviceGuard guard(v.get_device_index());
  SdmInPlaceCall call = prepare_sdm_in_place(
      op,
      state,
      write_idx,
      write_val,
      v,
      beta,
      g,
      read_idx,
      read_val,
      cu_seqlens,
      state_indices,
      chunk_size
  );
  const SdmCudaFwdParams params{
      call.params,
      device_integers(op, "cu_seqlens", cu_seqlens, v),
      device_integers(op, "state_indices", state_indices, v),
      state.size(0)
  };
  size_t bytes = 0;
  check_cuda(op, sdm_fwd_cuda_workspace(params, &bytes));
  Tensor workspace = new_workspace(v, bytes);
  check_cuda(op, launch_sdm_fwd(params, workspace.mutable_data_ptr(), current_stream(v)));
  return call.out;
}

Tensor sdm_step_cuda(
    Tensor state,
    const Tensor& write_idx,
    const Tensor& write_val,
    const Tensor& v,
    const Tensor& beta,
    const Tensor& g,
    const Tensor& read_idx,
    const Tensor& read_val,
    const std::optional<Tensor>& state_indices
) {
  const char* op = "sdm_step_";
  const DeviceGuard guard(v.get_device_index());
  SdmInPlaceCall call = prepare_sdm_in_place(
      op,
      state,
      write_idx,
      write_val,
      v,
      beta,
      g,
      read_idx,
      read_val,
      std::nullopt,
      state_indices,
      1
  );
  const SdmCudaFwdParams params{
      call.params,
      {nullptr, false},
      device_integers(op, "state_indices", state_indices, v),
      state.size(0)
  };
  check_cuda(op, launch_sdm_step(params, current_stream(v)));
  return call.out;
}

Tensor sdm_check_indices_cuda(const Tensor& idx, int64_t num_slots) {
  const char* op = "sdm_check_indices";
  check_contiguous(op, "idx", idx);
  const DeviceGuard guard(idx.get_device_index());
  const DeviceIntegers ids{idx.const_data_ptr(), is_int64(op, "idx", idx)};
  Tensor result = new_empty(idx, std::vector<int64_t>{}, ScalarType::Long);
  int64_t* first_bad = static_cast<int64_t*>(result.mutable_data_ptr());
  check_cuda(
      op, launch_sdm_check_indices(ids, idx.numel(), num_slots, first_bad, current_stream(idx))
  );
  return result;
}

}  // namespace sdm::ext
#endif
