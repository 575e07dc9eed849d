// SPDX-License-Identifier: Apache-2.0
//! @file The tensor-core backward of Kimi delta attention against the reverse of the token
//! recurrence in double.
//!
//! Standalone: returns 0 when every case agrees. Run with "time" it also times shapes, as a whole
//! and stage by stage; with "speed" it only does that, and a number behind it names the heads of
//! the one shape of 8192 tokens to time. Build: nvcc -std=c++17 -O3 -I. -arch=sm_90a
//! tests/cpp/test_kda_bwd.cu sdm_kernels/kda/cuda/kda_tensor_*.cu
//! sdm_kernels/kda/cuda/kda_plain_*.cu
#include "sdm_kernels/kda/cuda/kda_paths.h"
#include "tests/cpp/kda_bwd_time.h"
#include "tests/cpp/kda_device.h"

namespace sdm::test {
namespace {

struct Gradient {
  std::string name;
  std::vector<uint8_t> bytes;
  DType dtype;
  const std::vector<double>* want;
};

using Gradients = std::vector<Gradient>;

// All gradients; with c.saved from the chunk states of the forward.
Gradients run(const KdaDevice& d) {
  const KdaProblem& p = d.p;
  const KdaCase& c = p.c;
  const KdaForward fwd(d);
  if (c.saved != 0) {
    const DeviceBytes workspace(static_cast<int64_t>(kda::kda_tensor_fwd_workspace(fwd.params)));
    check(
        kda::launch_kda_tensor_fwd(fwd.params, workspace.data(), nullptr), "launch_kda_tensor_fwd"
    );
    check(cudaDeviceSynchronize(), "forward");
  }
  const KdaBackward bwd(d, fwd.params.base.chunk_states);
  {
    const DeviceBytes workspace(static_cast<int64_t>(kda::kda_tensor_bwd_workspace(bwd.params)));
    check(
        kda::launch_kda_tensor_bwd(bwd.params, workspace.data(), nullptr), "launch_kda_tensor_bwd"
    );
    check(cudaDeviceSynchronize(), "backward");
    workspace.fetch("workspace");
  }
  Gradients all;
  const auto add =
      [&](const char* name, const DeviceBytes& on, DType dtype, const std::vector<double>& want) {
        all.push_back({name, on.fetch(name), dtype, &want});
      };
  add("q", bwd.d_q, c.dtype, p.d_q);
  add("k", bwd.d_k, c.dtype, p.d_k);
  add("v", bwd.d_v, c.dtype, p.d_v);
  add("g", bwd.d_g, c.gate_dtype, p.d_g);
  add("beta", bwd.d_beta, c.beta_dtype, p.d_beta);
  if (c.A_log) {
    add("A_log", bwd.d_A_log, DType::kF32, p.d_A_log);
  }
  if (c.dt_bias) {
    add("dt_bias", bwd.d_dt_bias, DType::kF32, p.d_dt_bias);
  }
  if (c.initial) {
    add("initial", bwd.d_initial, DType::kF32, p.d_initial);
  }
  return all;
}

// Relative L2 errors that hold for random inputs. A_log has one number a head, a sum whose terms
// cancel: of a few heads it may be worse.
double limit_of(const std::string& name, const KdaCase& c) {
  if (name == "A_log") {
    return c.HV < 4 ? 1e-2 : 3.0e-3;
  }
  return name == "g" ? 3.6e-3 : (name == "dt_bias" ? 3.0e-3 : 3.4e-3);
}

// `slack` widens the limits where the problem itself loses digits.
int test_case(const KdaCase& c, double slack) {
  KdaProblem p = make_problem(c);
  solve(&p);
  const KdaDevice device(p);
  const Gradients got = run(device), again = run(device);
  int wrong = 0;
  std::string line;
  for (size_t i = 0; i < got.size(); ++i) {
    std::vector<double> values = to_doubles(got[i].bytes, got[i].dtype);
    if (got[i].name == "initial" && c.v_first) {
      values = swap_last(values, c.V, c.K);
    }
    const double error = relative_error(values, *got[i].want);
    const bool good = error <= slack * limit_of(got[i].name, c);
    const bool same = got[i].bytes == again[i].bytes;
    wrong += !good + !same;
    char text[80];
    std::snprintf(
        text,
        sizeof(text),
        " %s %.1e%s%s",
        got[i].name.c_str(),
        error,
        good ? "" : "!",
        same ? "" : " (differs)"
    );
    line += text;
  }
  std::printf("%-4s %s:%s\n", wrong == 0 ? "ok" : "FAIL", c.name, line.c_str());
  return wrong != 0;
}

// A packed sequence has the gradients of the same sequence alone, bit for bit.
int test_packed_bits(const KdaCase& c) {
  KdaProblem packed = make_problem(c);
  solve(&packed);
  const KdaDevice packed_device(packed);
  const Gradients all = run(packed_device);
  int wrong = 0;
  for (int64_t n = 0; n < packed.N; ++n) {
    const int64_t begin = packed.offsets[static_cast<size_t>(n)];
    const int64_t end = packed.offsets[static_cast<size_t>(n + 1)];
    const KdaProblem alone = part_of(packed, begin, end, n);
    const KdaDevice device(alone);
    const Gradients one = run(device);
    for (size_t i = 0; i < one.size(); ++i) {
      if (one[i].name == "A_log" || one[i].name == "dt_bias") {
        continue;  // sums over all sequences
      }
      const bool state = one[i].name == "initial";
      const int64_t size = static_cast<int64_t>(all[i].bytes.size()) / (state ? packed.N : c.T);
      const int64_t first = (state ? n : begin) * size;
      wrong += !std::equal(one[i].bytes.begin(), one[i].bytes.end(), all[i].bytes.begin() + first);
    }
  }
  std::printf("%-4s packed as alone\n", wrong == 0 ? "ok" : "FAIL");
  return wrong != 0;
}

struct Test {
  KdaCase c;
  double slack;
};

std::vector<Test> all_tests() {
  std::vector<Test> tests;
  const auto add = [&](const char* name, auto&& change, double slack = 1.0) {
    KdaCase c{name};
    c.T = 130;
    c.HV = 1;
    c.K = c.V = 128;
    c.dtype = c.gate_dtype = c.beta_dtype = c.d_out_dtype = DType::kBf16;
    c.saved = 2;
    change(&c);
    tests.push_back({c, slack});
  };
  add("base", [](KdaCase*) {});
  add("T=512, four heads", [](KdaCase* c) { c->T = 512, c->H = c->HV = 4; });
  add("many heads", [](KdaCase* c) { c->T = 70, c->H = c->HV = 66; });
  for (const int64_t T : {1, 15, 16, 17, 63, 64, 65}) {
    add("short", [&](KdaCase* c) { c->T = T; });
  }
  add("no tokens", [](KdaCase* c) { c->T = 0; });
  add("states recomputed", [](KdaCase* c) { c->saved = 0, c->T = 300; });
  add("K=V=64, float16, float gates", [](KdaCase* c) {
    c->K = c->V = 64, c->dtype = c->d_out_dtype = DType::kF16;
    c->gate_dtype = c->beta_dtype = DType::kF32, c->B = 3, c->T = 90;
  });
  add("K=64, V=128, V first, 2 -> 6 heads",
      [](KdaCase* c) { c->K = 64, c->H = 2, c->HV = 6, c->v_first = true, c->T = 100; });
  add("K=128, V=64, V first, float states, padded rows", [](KdaCase* c) {
    c->V = 64, c->v_first = true, c->saved = 1, c->pad = 3, c->H = 1, c->HV = 2, c->T = 100;
  });
  add("V first, padded rows", [](KdaCase* c) { c->v_first = true, c->pad = 8, c->HV = 2; });
  add("softplus gate", [](KdaCase* c) {
    c->gate = KdaGate::kSoftplus, c->gate_mean = -2, c->gate_spread = 3, c->T = 300;
  });
  add("softplus gate, +-30",
      [](KdaCase* c) { c->gate = KdaGate::kSoftplus, c->gate_spread = 30, c->T = 200; });
  add("bound -50", [](KdaCase* c) { c->lower_bound = -50, c->d_final = false, c->T = 200; });
  add("given gates, 0 to -60", [](KdaCase* c) {
    c->gate = KdaGate::kActivated, c->gate_spread = 30, c->gate_dtype = DType::kF32;
    c->A_log = c->dt_bias = false;
  });
  add("slow decay, no A_log", [](KdaCase* c) { c->gate_mean = -7, c->T = 512, c->A_log = false; });
  add("given beta, no norm",
      [](KdaCase* c) { c->beta = KdaBeta::kActivated, c->l2norm = false, c->gate_mean = -2; });
  add("alike keys", [](KdaCase* c) { c->alike = 0.77, c->gate_mean = -5, c->T = 300; });
  add(
      "alike keys, beta up to 2",
      [](KdaCase* c) {
        c->alike = 0.77, c->beta = KdaBeta::kTwoSigmoid, c->gate_mean = -6, c->T = 300;
      },
      2.0
  );
  add("no states", [](KdaCase* c) { c->initial = c->d_final = false, c->T = 200; });
  add("one gradient, float",
      [](KdaCase* c) { c->expanded = true, c->d_out_dtype = DType::kF32, c->T = 77; });
  add("packed", [](KdaCase* c) {
    c->lengths = {0, 1, 15, 16, 17, 0, 64, 65, 130, 3, 0}, c->T = 320, c->HV = 2;
  });
  add("packed, states recomputed",
      [](KdaCase* c) { c->lengths = {33, 0, 131, 64, 5}, c->T = 233, c->K = 64, c->saved = 0; });
  add("segments", [](KdaCase* c) { c->T = 2500, c->HV = 2; });
  add("segments, states recomputed, V first",
      [](KdaCase* c) { c->T = 2049, c->B = 2, c->saved = 0, c->v_first = true, c->A_log = false; });
  add("segments, K=64, V=128, 1 -> 3 heads",
      [](KdaCase* c) { c->K = 64, c->HV = 3, c->T = 1100, c->pad = 3; });
  add("segments, slow decay, K=128, V=64",
      [](KdaCase* c) { c->gate_mean = -7, c->T = 3000, c->V = 64, c->d_final = false; });
  add("segments, no norm", [](KdaCase* c) { c->l2norm = false, c->gate_mean = -2, c->T = 1500; });
  // What a chunk leaves of a transition is 0 in fp16 and not in float.
  add("segments, decay of 2^-37 a chunk", [](KdaCase* c) {
    c->T = 2500, c->HV = 1, c->gate_mean = -2.44, c->gate_spread = 0.05;
    c->A_log = c->dt_bias = false;
  });
  add("segments, packed", [](KdaCase* c) {
    c->lengths = {1024, 0, 1025, 2300, 1, 63}, c->T = 4413, c->saved = 0, c->A_log = false;
  });
  add("segments, packed, windows", [](KdaCase* c) {
    c->lengths = {5000, 0, 70, 12600, 1, 1329}, c->T = 19000;
    c->H = 4, c->HV = 8, c->K = c->V = 64;
  });
  return tests;
}

}  // namespace
}  // namespace sdm::test

int main(int argc, char** argv) {
  using namespace sdm::test;
  const std::string mode = argc > 1 ? argv[1] : "";
  int failures = 0;
  if (mode != "speed") {
    for (const Test& test : all_tests()) {
      failures += test_case(test.c, test.slack);
    }
    KdaCase packed{"packed"};
    packed.lengths = {5, 0, 64, 1, 170, 16};
    packed.T = 256;
    packed.K = packed.V = 128;
    packed.dtype = packed.gate_dtype = packed.d_out_dtype = sdm::DType::kBf16;
    failures += test_packed_bits(packed);
    packed.saved = 2;
    failures += test_packed_bits(packed);
    packed.lengths = {1100, 0, 64, 2049};
    packed.T = 3213;
    failures += test_packed_bits(packed);
    std::printf("%d failures\n", failures);
  }
  if (argc > 2) {
    time_kda_bwd(1, 8192, std::atoll(argv[2]), true);
  } else if (mode == "time" || mode == "speed") {
    for (const int64_t heads : {96, 64, 32, 8}) {
      time_kda_bwd(1, 8192, heads, true);
    }
    time_kda_bwd(1, 8192, 96, false);
    time_kda_bwd(8, 2048, 32, true);
    time_kda_bwd(1, 32768, 32, true);
  }
  return failures == 0 ? 0 : 1;
}
