// SPDX-License-Identifier: Apache-2.0
//! @file The plain path of Kimi delta attention against the token recurrence in double.
//!
//! Standalone: returns 0 when every case agrees. Run with "time" it also times a shape. Build:
//! nvcc -std=c++17 -O3 -I. -arch=sm_90 tests/cpp/test_kda_plain.cu
//! sdm_kernels/kda/cuda/kda_plain_*.cu
#include "sdm_kernels/kda/cuda/kda_paths.h"
#include "tests/cpp/kda_device.h"

namespace sdm::test {
namespace {

struct Results {
  std::vector<std::string> names;
  std::vector<std::vector<uint8_t>> bytes;
  std::vector<DType> dtypes;

  void add(const char* name, const DeviceBytes& on, DType dtype) {
    names.push_back(name);
    bytes.push_back(on.fetch(name));
    dtypes.push_back(dtype);
  }
};

Results run(const KdaDevice& d) {
  const KdaCase& c = d.p.c;
  const KdaForward fwd(d);
  {
    const DeviceBytes workspace(static_cast<int64_t>(kda::kda_plain_fwd_workspace(fwd.params)));
    check(kda::launch_kda_plain_fwd(fwd.params, workspace.data(), nullptr), "launch_kda_plain_fwd");
    check(cudaDeviceSynchronize(), "forward");
    workspace.fetch("workspace of the forward");
  }
  const KdaBackward bwd(d, fwd.params.base.chunk_states);
  {
    const DeviceBytes workspace(static_cast<int64_t>(kda::kda_plain_bwd_workspace(bwd.params)));
    check(kda::launch_kda_plain_bwd(bwd.params, workspace.data(), nullptr), "launch_kda_plain_bwd");
    check(cudaDeviceSynchronize(), "backward");
    workspace.fetch("workspace of the backward");
  }
  Results results;
  results.add("out", fwd.out, c.dtype);
  if (c.final_state) {
    results.add("final_state", fwd.final_state, DType::kF32);
  }
  results.add("d_q", bwd.d_q, c.dtype);
  results.add("d_k", bwd.d_k, c.dtype);
  results.add("d_v", bwd.d_v, c.dtype);
  results.add("d_g", bwd.d_g, c.gate_dtype);
  results.add("d_beta", bwd.d_beta, c.beta_dtype);
  if (c.A_log) {
    results.add("d_A_log", bwd.d_A_log, DType::kF32);
  }
  if (c.dt_bias) {
    results.add("d_dt_bias", bwd.d_dt_bias, DType::kF32);
  }
  if (c.initial) {
    results.add("d_initial", bwd.d_initial, DType::kF32);
  }
  if (c.saved != 0) {
    fwd.chunk_states.fetch("chunk states");
  }
  return results;
}

const std::vector<double>& wanted(const KdaProblem& p, const std::string& name) {
  return name == "out"           ? p.out
         : name == "final_state" ? p.final_state
         : name == "d_q"         ? p.d_q
         : name == "d_k"         ? p.d_k
         : name == "d_v"         ? p.d_v
         : name == "d_g"         ? p.d_g
         : name == "d_beta"      ? p.d_beta
         : name == "d_A_log"     ? p.d_A_log
         : name == "d_dt_bias"   ? p.d_dt_bias
                                 : p.d_initial;
}

// Float32 arithmetic, plus the rounding of what is stored in 16 bits.
double limit(const KdaCase& c, DType stored, bool gradient) {
  if (stored == DType::kBf16 || (c.saved == 2 && gradient)) {
    return 4e-3;
  }
  if (stored == DType::kF16) {
    return 1e-3;
  }
  return gradient ? 2e-5 : 5e-6;
}

int test_case(const KdaCase& c) {
  KdaProblem p = make_problem(c);
  solve(&p);
  const KdaDevice device(p);
  const Results got = run(device), again = run(device);
  int wrong = 0;
  std::string line;
  for (size_t i = 0; i < got.names.size(); ++i) {
    const std::string& name = got.names[i];
    const bool state = name == "final_state" || name == "d_initial";
    std::vector<double> values = to_doubles(got.bytes[i], got.dtypes[i]);
    if (state && c.v_first) {
      values = swap_last(values, c.V, c.K);
    }
    const double error = relative_error(values, wanted(p, name));
    const bool gradient = name != "out" && name != "final_state";
    const bool good = error <= limit(c, got.dtypes[i], gradient);
    const bool same = got.bytes[i] == again.bytes[i];
    wrong += !good + !same;
    char text[80];
    std::snprintf(
        text,
        sizeof(text),
        " %s %.1e%s%s",
        name.c_str(),
        error,
        good ? "" : "!",
        same ? "" : " (differs)"
    );
    line += text;
  }
  std::printf("%-4s %s:%s\n", wrong == 0 ? "ok" : "FAIL", c.name, line.c_str());
  return wrong != 0;
}

// The output of a prefix has the bits of the whole's, whatever comes after.
int test_prefix(KdaCase c, int64_t prefix) {
  KdaProblem whole = make_problem(c);
  solve(&whole);
  const KdaProblem part = part_of(whole, 0, prefix, 0);
  const KdaDevice whole_device(whole), part_device(part);
  const Results a = run(whole_device), b = run(part_device);
  const bool same = std::equal(b.bytes[0].begin(), b.bytes[0].end(), a.bytes[0].begin());
  std::printf("%-4s prefix of %lld\n", same ? "ok" : "FAIL", static_cast<long long>(prefix));
  return !same;
}

// A packed sequence has the bits of the same sequence alone.
int test_packed_bits(KdaCase c) {
  KdaProblem packed = make_problem(c);
  const KdaDevice packed_device(packed);
  const Results all = run(packed_device);
  int wrong = 0;
  for (int64_t n = 0; n < packed.N; ++n) {
    const int64_t begin = packed.offsets[static_cast<size_t>(n)];
    const int64_t end = packed.offsets[static_cast<size_t>(n + 1)];
    const KdaProblem alone = part_of(packed, begin, end, n);
    const KdaDevice device(alone);
    const Results one = run(device);
    for (size_t i = 0; i < one.names.size(); ++i) {
      if (one.names[i] == "d_A_log" || one.names[i] == "d_dt_bias") {
        continue;  // sums over all sequences
      }
      const bool state = one.names[i] == "final_state" || one.names[i] == "d_initial";
      const int64_t size = static_cast<int64_t>(all.bytes[i].size()) / (state ? packed.N : c.T);
      const int64_t first = (state ? n : begin) * size;
      wrong += !std::equal(one.bytes[i].begin(), one.bytes[i].end(), all.bytes[i].begin() + first);
    }
  }
  std::printf("%-4s packed as alone\n", wrong == 0 ? "ok" : "FAIL");
  return wrong != 0;
}

std::vector<KdaCase> all_cases() {
  std::vector<KdaCase> cases;
  const auto add = [&](const char* name, auto&& change) {
    KdaCase c{name};
    change(&c);
    cases.push_back(c);
  };
  add("base", [](KdaCase*) {});
  add("one token", [](KdaCase* c) { c->T = 1; });
  add("no tokens", [](KdaCase* c) { c->T = 0; });
  add("K=V=16, one head", [](KdaCase* c) { c->K = c->V = 16, c->HV = 1, c->T = 17; });
  add("K=48, V=80, C=16, batch",
      [](KdaCase* c) { c->K = 48, c->V = 80, c->C = 16, c->B = 2, c->T = 33, c->pad = 16; });
  add("K=96, V=64, C=32, 2 -> 6 heads", [](KdaCase* c) {
    c->K = 96, c->C = 32, c->V = 64, c->H = 2, c->HV = 6, c->T = 70, c->v_first = true;
  });
  add("K=V=128", [](KdaCase* c) { c->K = c->V = 128, c->T = 150, c->saved = 1; });
  add("K=256, V=48", [](KdaCase* c) { c->K = 256, c->V = 48, c->T = 67; });
  add("K=V=256", [](KdaCase* c) { c->K = c->V = 256, c->T = 35, c->HV = 1; });
  add("K=144, V=240, saved, V first", [](KdaCase* c) {
    c->K = 144, c->V = 240, c->T = 90, c->C = 16, c->saved = 1, c->v_first = true;
  });
  add("softplus, strong gates", [](KdaCase* c) {
    c->gate = KdaGate::kSoftplus, c->gate_mean = 10, c->gate_spread = 20, c->T = 100;
  });
  add("bound -50", [](KdaCase* c) { c->lower_bound = -50, c->T = 100; });
  add("given gates, 0 to -60", [](KdaCase* c) {
    c->gate = KdaGate::kActivated, c->gate_spread = 30, c->T = 100;
    c->A_log = c->dt_bias = false;
  });
  add("slow decay, no A_log", [](KdaCase* c) { c->gate_mean = -7, c->T = 200, c->A_log = false; });
  add("alike keys, beta up to 2", [](KdaCase* c) {
    c->alike = 0.7, c->beta = KdaBeta::kTwoSigmoid, c->gate_mean = -6, c->T = 130;
  });
  add("given beta, no norm", [](KdaCase* c) {
    c->beta = KdaBeta::kActivated, c->l2norm = false, c->gate_mean = -2, c->T = 90;
  });
  add("no states", [](KdaCase* c) { c->initial = c->final_state = c->d_final = false, c->T = 66; });
  add("bfloat16", [](KdaCase* c) {
    c->dtype = c->gate_dtype = c->beta_dtype = c->d_out_dtype = DType::kBf16;
    c->state_dtype = DType::kBf16, c->T = 100, c->saved = 2, c->pad = 8;
  });
  add("float16, float32 gates, one gradient", [](KdaCase* c) {
    c->dtype = DType::kF16, c->d_out_dtype = DType::kBf16, c->expanded = true, c->T = 77;
  });
  add("packed", [](KdaCase* c) {
    c->lengths = {0, 1, 15, 16, 17, 0, 64, 65, 3, 0}, c->T = 190, c->H = 1, c->HV = 2;
  });
  add("packed, saved, C=32", [](KdaCase* c) {
    c->lengths = {33, 0, 31, 64, 5}, c->T = 133, c->C = 32, c->saved = 1, c->K = 64;
  });
  add("packed, saved, C=16", [](KdaCase* c) {
    c->lengths = {1, 1, 1, 40}, c->T = 43, c->C = 16, c->saved = 1, c->v_first = true;
  });
  return cases;
}

// Median times at B = 1, K = V = 128.
void time_shape(int64_t T, int64_t heads, DType dtype) {
  KdaCase c{"time"};
  c.T = T;
  c.H = c.HV = heads;
  c.K = c.V = 128;
  c.dtype = c.gate_dtype = c.beta_dtype = c.d_out_dtype = dtype;
  c.initial = c.final_state = c.d_final = false;
  c.gate_mean = -1;
  const KdaProblem p = make_problem(c);
  const KdaDevice d(p);
  const int64_t elements = T * heads * c.K;
  const DeviceBytes out(elements * 4), d_q(elements * 4), d_k(elements * 4), d_v(elements * 4);
  const DeviceBytes d_g(elements * 4), d_beta(T * heads * 4), d_A_log(heads * 4);
  const DeviceBytes d_dt_bias(heads * c.K * 4);
  kda::KdaCudaFwdParams fwd{};
  fwd.base.dims = d.dims();
  fwd.base.options = d.options();
  fwd.base.tokens = d.tokens();
  fwd.base.out = out.data();
  kda::KdaCudaBwdParams bwd{};
  bwd.base.dims = d.dims();
  bwd.base.options = d.options();
  bwd.base.tokens = d.tokens();
  bwd.base.d_out = d.d_out_view();
  bwd.base.d_q = d_q.data();
  bwd.base.d_k = d_k.data();
  bwd.base.d_v = d_v.data();
  bwd.base.d_g = d_g.data();
  bwd.base.d_beta = d_beta.data();
  bwd.base.d_A_log = static_cast<float*>(d_A_log.data());
  bwd.base.d_dt_bias = static_cast<float*>(d_dt_bias.data());
  const size_t bytes =
      std::max(kda::kda_plain_fwd_workspace(fwd), kda::kda_plain_bwd_workspace(bwd));
  const DeviceBytes workspace(static_cast<int64_t>(bytes));
  cudaEvent_t event[3];
  for (cudaEvent_t& e : event) {
    check(cudaEventCreate(&e), "event");
  }
  std::vector<float> forward, backward;
  for (int i = 0; i < 13; ++i) {
    check(cudaEventRecord(event[0]), "event");
    check(kda::launch_kda_plain_fwd(fwd, workspace.data(), nullptr), "forward");
    check(cudaEventRecord(event[1]), "event");
    check(kda::launch_kda_plain_bwd(bwd, workspace.data(), nullptr), "backward");
    check(cudaEventRecord(event[2]), "event");
    check(cudaEventSynchronize(event[2]), "event");
    float time[2];
    check(cudaEventElapsedTime(&time[0], event[0], event[1]), "event");
    check(cudaEventElapsedTime(&time[1], event[1], event[2]), "event");
    if (i >= 3) {
      forward.push_back(time[0]);
      backward.push_back(time[1]);
    }
  }
  std::sort(forward.begin(), forward.end());
  std::sort(backward.begin(), backward.end());
  std::printf(
      "time T=%lld H=%lld K=V=128 %s: forward %.3f ms, backward %.3f ms, workspace %.0f MB\n",
      static_cast<long long>(T),
      static_cast<long long>(heads),
      dtype == DType::kF32 ? "float32" : "bfloat16",
      forward[forward.size() / 2],
      backward[backward.size() / 2],
      static_cast<double>(bytes) * 1e-6
  );
}

}  // namespace
}  // namespace sdm::test

int main(int argc, char** argv) {
  using namespace sdm::test;
  int failures = 0;
  for (const KdaCase& c : all_cases()) {
    failures += test_case(c);
  }
  KdaCase c{"prefix"};
  c.T = 100;
  for (const int64_t prefix : {1, 16, 37, 64, 99}) {
    failures += test_prefix(c, prefix);
  }
  KdaCase packed{"packed"};
  packed.lengths = {5, 0, 64, 1, 70, 16};
  packed.T = 156;
  failures += test_packed_bits(packed);
  std::printf("%d failures\n", failures);
  if (argc > 1 && std::string(argv[1]) == "time") {
    time_shape(8192, 32, sdm::DType::kF32);
    time_shape(8192, 32, sdm::DType::kBf16);
    time_shape(8192, 8, sdm::DType::kF32);
  }
  return failures != 0;
}
