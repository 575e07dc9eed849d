// SPDX-License-Identifier: Apache-2.0
//! @file The op schemas, once, and one block of implementations per backend; no logic.
#include <torch/csrc/stable/library.h>

#include "registration.h"
#include "torch-ext/kda_ops.h"
#include "torch-ext/sdm_ops.h"
#include "torch-ext/topk_ops.h"

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, ops) {
  ops.def("product_key_topk_fwd(Tensor scores, int[] factor_dims, int k) -> (Tensor, Tensor)");
  ops.def("product_key_topk_bwd(Tensor d_values, Tensor indices, int[] factor_dims) -> Tensor");
  ops.def(
      "sdm_chunk_fwd(Tensor write_idx, Tensor write_val, Tensor v, Tensor beta, Tensor g, "
      "Tensor read_idx, Tensor read_val, Tensor initial_state, Tensor? cu_seqlens, "
      "int chunk_size, bool output_final_state, int save_mode, int segment_chunks) "
      "-> (Tensor out, Tensor final_state, Tensor errors, Tensor saved_rows, Tensor row_scales, "
      "Tensor row_links)"
  );
  ops.def(
      "sdm_chunk_bwd(Tensor d_out, Tensor? d_final_state, Tensor write_idx, Tensor write_val, "
      "Tensor beta, Tensor g, Tensor read_idx, Tensor read_val, Tensor bank, Tensor? cu_seqlens, "
      "Tensor errors, Tensor saved_rows, Tensor row_scales, Tensor row_links, int chunk_size, "
      "int save_mode, int segment_chunks, bool shared_bank, bool need_state_grad) "
      "-> (Tensor d_write_val, Tensor d_v, Tensor d_beta, Tensor d_g, Tensor d_read_val, "
      "Tensor d_initial_state)"
  );
  ops.def(
      "sdm_chunk_(Tensor(a!) state, Tensor write_idx, Tensor write_val, Tensor v, Tensor beta, "
      "Tensor g, Tensor read_idx, Tensor read_val, Tensor? cu_seqlens, Tensor? state_indices, "
      "int chunk_size) -> Tensor"
  );
  ops.def(
      "sdm_step_(Tensor(a!) state, Tensor write_idx, Tensor write_val, Tensor v, Tensor beta, "
      "Tensor g, Tensor read_idx, Tensor read_val, Tensor? state_indices) -> Tensor"
  );
  ops.def("sdm_check_indices(Tensor idx, int num_slots) -> Tensor");
  ops.def(
      "kda_chunk_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, "
      "Tensor? dt_bias, Tensor? initial_state, Tensor? cu_seqlens, float scale, bool l2norm, "
      "int gate, float lower_bound, int beta_mode, bool v_first, int chunk_size, "
      "bool output_final_state, bool output_chunk_states) "
      "-> (Tensor out, Tensor final_state, Tensor chunk_states)"
  );
  ops.def(
      "kda_chunk_bwd(Tensor d_out, Tensor? d_final_state, Tensor q, Tensor k, Tensor v, Tensor g, "
      "Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, Tensor? cu_seqlens, "
      "Tensor? chunk_states, float scale, bool l2norm, int gate, float lower_bound, "
      "int beta_mode, bool v_first, int chunk_size, bool need_gate_grad, bool need_state_grad) "
      "-> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_g, Tensor d_beta, Tensor d_A_log, "
      "Tensor d_dt_bias, Tensor d_initial_state)"
  );
  ops.def(
      "kda_recurrent_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, "
      "Tensor? dt_bias, Tensor? initial_state, Tensor? cu_seqlens, float scale, bool l2norm, "
      "int gate, float lower_bound, int beta_mode, bool v_first, bool output_final_state) "
      "-> (Tensor out, Tensor final_state)"
  );
  ops.def(
      "kda_step_(Tensor(a!) state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
      "Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens, Tensor? state_indices, float scale, "
      "bool l2norm, int gate, float lower_bound, int beta_mode, bool v_first) -> Tensor"
  );
}

// Every variant holds the CPU kernels, the CUDA ones too: a CUDA user has CPU tensors as well.
STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("product_key_topk_fwd", TORCH_BOX(&sdm::ext::product_key_topk_fwd<sdm::ext::Cpu>));
  ops.impl("product_key_topk_bwd", TORCH_BOX(&sdm::ext::product_key_topk_bwd<sdm::ext::Cpu>));
  ops.impl("sdm_chunk_fwd", TORCH_BOX(&sdm::ext::sdm_chunk_fwd<sdm::ext::Cpu>));
  ops.impl("sdm_chunk_bwd", TORCH_BOX(&sdm::ext::sdm_chunk_bwd<sdm::ext::Cpu>));
  ops.impl("sdm_chunk_", TORCH_BOX(&sdm::ext::sdm_chunk<sdm::ext::Cpu>));
  ops.impl("sdm_step_", TORCH_BOX(&sdm::ext::sdm_step<sdm::ext::Cpu>));
  ops.impl("sdm_check_indices", TORCH_BOX(&sdm::ext::sdm_check_indices<sdm::ext::Cpu>));
  ops.impl("kda_chunk_fwd", TORCH_BOX(&sdm::ext::kda_chunk_fwd<sdm::ext::Cpu>));
  ops.impl("kda_chunk_bwd", TORCH_BOX(&sdm::ext::kda_chunk_bwd<sdm::ext::Cpu>));
  ops.impl("kda_recurrent_fwd", TORCH_BOX(&sdm::ext::kda_recurrent_fwd<sdm::ext::Cpu>));
  ops.impl("kda_step_", TORCH_BOX(&sdm::ext::kda_step<sdm::ext::Cpu>));
}

#ifdef CUDA_KERNEL
STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("product_key_topk_fwd", TORCH_BOX(&sdm::ext::product_key_topk_fwd<sdm::ext::Cuda>));
  ops.impl("product_key_topk_bwd", TORCH_BOX(&sdm::ext::product_key_topk_bwd<sdm::ext::Cuda>));
  ops.impl("sdm_chunk_fwd", TORCH_BOX(&sdm::ext::sdm_chunk_fwd<sdm::ext::Cuda>));
  ops.impl("sdm_chunk_bwd", TORCH_BOX(&sdm::ext::sdm_chunk_bwd<sdm::ext::Cuda>));
  ops.impl("sdm_chunk_", TORCH_BOX(&sdm::ext::sdm_chunk<sdm::ext::Cuda>));
  ops.impl("sdm_step_", TORCH_BOX(&sdm::ext::sdm_step<sdm::ext::Cuda>));
  ops.impl("sdm_check_indices", TORCH_BOX(&sdm::ext::sdm_check_indices<sdm::ext::Cuda>));
  ops.impl("kda_chunk_fwd", TORCH_BOX(&sdm::ext::kda_chunk_fwd<sdm::ext::Cuda>));
  ops.impl("kda_chunk_bwd", TORCH_BOX(&sdm::ext::kda_chunk_bwd<sdm::ext::Cuda>));
  ops.impl("kda_recurrent_fwd", TORCH_BOX(&sdm::ext::kda_recurrent_fwd<sdm::ext::Cuda>));
  ops.impl("kda_step_", TORCH_BOX(&sdm::ext::kda_step<sdm::ext::Cuda>));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
