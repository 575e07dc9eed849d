// SPDX-License-Identifier: Apache-2.0
//! @file Times of the tensor-core backward of Kimi delta attention, as a whole and by stage.
#pragma once

#include <algorithm>
#include <cstdio>
#include <vector>

#include "sdm_kernels/kda/cuda/kda_paths.h"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd.h"
#include "sdm_kernels/kda/cuda/kda_tensor_prep.cuh"
#include "tests/cpp/kda_time.h"

namespace sdm::test {

// Medians of the stages alone, summed over the windows of so many records; the carry between
// windows is left out.
inline void time_stages(const kda::KdaCudaBwdParams& p, int64_t window_records) {
  constexpr int64_t kK = 128, kV = 128;
  constexpr int64_t kCarry = (kK / 2 + 2) * 32 * (kV / 16);  // floats of a head between windows
  using Record = kda::KdaRecord<kK>;
  const kda::KdaDims& dims = p.base.dims;
  const int64_t heads = dims.HV, rows = dims.B * dims.T * heads;
  const kda::KdaWindowPlan plan = kda::kda_window_plan(dims, false, window_records);
  Stopwatch time;
  std::vector<float> prep, scan, tokens;
  const int64_t entries = plan.max_slots() * heads;
  const DeviceBytes records(entries * Record::kForwardBytes);
  const DeviceBytes grads(entries * kda::KdaBwdRecord<kK, kV>::kBytes);
  const DeviceBytes sums(rows / 64 * 2 * kK * 4 + heads * 2 * kK * 4);
  const int64_t carry_bytes = 2 * plan.group * heads * kCarry * 4;
  const DeviceBytes carry(carry_bytes);
  check(cudaMemset(carry.data(), 0, static_cast<size_t>(carry_bytes)), "cudaMemset");
  kda::KdaSegments states{};
  states.carry_rows = plan.group;
  states.carry = static_cast<float*>(carry.data());
  for (int i = 0; i < 7; ++i) {
    float sum[3] = {};
    for (int64_t w = plan.num_windows() - 1; w >= 0; --w) {
      const kda::KdaBwdWindow common{
          dims,
          p.base.options,
          p.base.tokens,
          {},
          plan.window(w),
          {static_cast<char*>(records.data()), Record::kForwardBytes},
          static_cast<char*>(grads.data())
      };
      const kda::KdaBwdScanParams scan_params{common, p.base.d_out, {}, {}, states};
      kda::KdaBwdTokenParams token_params{};
      token_params.common = common;
      token_params.d_out = p.base.d_out;
      token_params.chunk_states = p.base.chunk_states;
      token_params.d_q = p.base.d_q;
      token_params.d_k = p.base.d_k;
      token_params.d_v = p.base.d_v;
      token_params.d_g = p.base.d_g;
      token_params.d_beta = p.base.d_beta;
      token_params.gate_sums = static_cast<float*>(sums.data());
      token_params.aligned_v = token_params.aligned_out = true;
      token_params.aligned_qk = token_params.aligned_g = true;
      sum[0] += time([&] {
        return kda::launch_kda_tensor_prep(
            {dims, common.options, common.tokens, {}, common.window, common.records}, nullptr
        );
      });
      sum[1] += time([&] { return kda::launch_kda_tensor_bwd_scan(scan_params, nullptr); });
      sum[2] += time([&] { return kda::launch_kda_tensor_bwd_tokens(token_params, nullptr); });
    }
    if (i >= 2) {
      prep.push_back(sum[0]);
      scan.push_back(sum[1]);
      tokens.push_back(sum[2]);
    }
  }
  std::printf(
      "  %lld windows: records %.3f scan %.3f tokens %.3f ms\n",
      static_cast<long long>(plan.num_windows()),
      median(prep),
      median(scan),
      median(tokens)
  );
}

// Medians at K = V = 128, bfloat16, everything raw. With `saved` the states are there.
inline void time_kda_bwd(int64_t B, int64_t T, int64_t heads, bool saved) {
  constexpr int64_t kK = KdaLargeInputs::kK, kV = KdaLargeInputs::kV;
  const KdaLargeInputs in(B, T, heads);
  const int64_t rows = in.rows(), elements = rows * kK;
  const DeviceBytes d_out(elements * 2);
  fill(d_out, elements, 0, 6);
  const DeviceBytes d_q(elements * 2), d_k(elements * 2), d_v(elements * 2), d_g(elements * 2);
  const DeviceBytes d_beta(rows * 2), d_A_log(heads * 4), d_dt_bias(heads * kK * 4);
  const DeviceBytes states(saved ? in.chunk_rows() * heads * kK * kV * 2 : int64_t{0});
  kda::KdaCudaBwdParams p{};
  p.base.dims = in.dims;
  p.base.options = in.options();
  p.base.tokens = in.tokens();
  p.base.d_out = in.view(d_out, kV);
  p.base.chunk_states = {saved ? states.data() : nullptr, DType::kBf16, false};
  p.base.d_q = d_q.data();
  p.base.d_k = d_k.data();
  p.base.d_v = d_v.data();
  p.base.d_g = d_g.data();
  p.base.d_beta = d_beta.data();
  p.base.d_A_log = static_cast<float*>(d_A_log.data());
  p.base.d_dt_bias = static_cast<float*>(d_dt_bias.data());
  kda::KdaCudaFwdParams fwd{};
  fwd.base.dims = in.dims;
  fwd.base.options = p.base.options;
  fwd.base.tokens = p.base.tokens;
  fwd.base.chunk_states = p.base.chunk_states;
  fwd.base.out = d_v.data();
  const size_t bytes = kda::kda_tensor_bwd_workspace(p);
  const DeviceBytes workspace(
      static_cast<int64_t>(std::max(bytes, kda::kda_tensor_fwd_workspace(fwd)))
  );
  Stopwatch time;
  std::vector<float> forward, whole;
  for (int i = 0; i < 13; ++i) {
    const float f =
        time([&] { return kda::launch_kda_tensor_fwd(fwd, workspace.data(), nullptr); });
    const float w = time([&] { return kda::launch_kda_tensor_bwd(p, workspace.data(), nullptr); });
    if (i >= 3) {
      forward.push_back(f);
      whole.push_back(w);
    }
  }

  std::printf(
      "time B=%lld T=%lld H=%lld %s: forward %.3f backward %.3f ms, workspace %.0f MB\n",
      static_cast<long long>(B),
      static_cast<long long>(T),
      static_cast<long long>(heads),
      saved ? "states kept" : "states recomputed",
      median(forward),
      median(whole),
      static_cast<double>(bytes) * 1e-6
  );
  if (saved && kda::kda_segment_chunks(in.dims) == 0) {
    for (const int64_t records : {396, 792, 1536}) {
      time_stages(p, records);
    }
  }
}

}  // namespace sdm::test
