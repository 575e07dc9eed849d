// SPDX-License-Identifier: Apache-2.0
//! @file The CUDA decode step against the recurrence in double, on random cases, and its bits: in
//! parts, and after a kernel that writes the token while the step has already started.
//!
//! Standalone: returns 0 when all cases agree. Build: nvcc -std=c++17 -O3 -I. -arch=sm_90
//! tests/cpp/test_step.cu sdm_kernels/sdm/cuda/sdm_step.cu
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include <cuda_runtime.h>

#include "tests/cpp/step_case.h"

namespace sdm::test {
namespace {

// Runs sequences [n0, n0 + N) and tokens [t0, t0 + T).
// `before` comes right before the step.
void run(
    Problem* p,
    int64_t n0,
    int64_t N,
    int64_t t0,
    int64_t T,
    const std::function<void()>& before = []() {}
) {
  const Case& c = p->c;
  SdmCudaFwdParams params{};
  SdmFwdParams& base = params.base;
  base.dims = SdmDims{N, T, c.H, c.W, c.R, c.D, c.S, N, 1, c.gate_per_write};
  const auto from = [&](const Tensor& x, int64_t size) {
    return static_cast<char*>(x.device) + x.at(n0, t0, 0, 0) * size;
  };
  const auto ids = [&](const Tensor& x, bool wide) {
    IndexView view{from(x, wide ? 8 : 4), wide, {}};
    std::copy(x.stride, x.stride + 4, view.stride);
    return view;
  };
  const auto floats = [&](const Tensor& x, DType dtype) {
    FloatView view{from(x, element_size(dtype)), dtype, {}};
    std::copy(x.stride, x.stride + 4, view.stride);
    return view;
  };
  base.tokens = SdmTokens{
      ids(p->write_idx, c.write_int64),
      ids(p->read_idx, c.read_int64),
      floats(p->write_val, c.values),
      floats(p->read_val, c.values),
      floats(p->v, c.values),
      floats(p->beta, DType::kF32),
      floats(p->g, DType::kF32)
  };
  base.bank_dtype = c.bank;
  base.bank.data = p->bank.device;
  if (!c.pool) {
    base.bank.data =
        static_cast<char*>(p->bank.device) + n0 * p->bank.stride[0] * element_size(c.bank);
  }
  std::copy(p->bank.stride, p->bank.stride + 3, base.bank.stride);
  params.pool = c.pool ? p->pool : N;
  if (c.pool) {
    params.state_indices = {static_cast<char*>(p->state.device) + n0 * 8, true};
  }
  // out is contiguous over the tokens of the call
  Bytes part(static_cast<size_t>(N * T * c.H * c.D * element_size(c.values)));
  void* out = nullptr;
  check(cudaMalloc(&out, std::max<size_t>(part.size(), 1)), "cudaMalloc");
  base.out = out;
  before();
  check(launch_sdm_step(params, nullptr), "launch_sdm_step");
  check(cudaDeviceSynchronize(), "step");
  check(cudaMemcpy(part.data(), out, part.size(), cudaMemcpyDeviceToHost), "copy out");
  cudaFree(out);
  const size_t row = static_cast<size_t>(c.H * c.D * element_size(c.values));
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t t = 0; t < T; ++t) {
      std::memcpy(
          p->out.host.data() + static_cast<size_t>((n0 + n) * c.T + t0 + t) * row,
          part.data() + static_cast<size_t>(n * T + t) * row,
          row
      );
    }
  }
  p->bank.download();
}

// Greatest difference from the recurrence, relative to 1; `start` is the bank before the call. The
// bank is rounded after every token, as the step does.
double difference(const Problem& p, const Bytes& start) {
  const Case& c = p.c;
  Tensor bank = p.bank;
  bank.host = start;
  double worst = 0.0;
  const auto compare = [&](double got, double want) {
    const double error = std::fabs(got - want);
    worst = error <= worst ? worst : error;
    worst = error == error ? worst : 1e30;
  };
  std::vector<double> rows(static_cast<size_t>(c.S * c.D));
  for (int64_t n = 0; n < c.N; ++n) {
    const int64_t row = p.rows[static_cast<size_t>(n)];
    for (int64_t t = 0; t < c.T; ++t) {
      for (int64_t h = 0; h < c.H; ++h) {
        const auto slot = [&](bool write, int64_t a) {
          const int64_t id = write ? id_of(p.write_idx, c.write_int64, p.write_idx.at(n, t, h, a))
                                   : id_of(p.read_idx, c.read_int64, p.read_idx.at(n, t, h, a));
          return id >= 0 && id < c.S ? id : -1;
        };
        const auto out_at = [&](int64_t i) { return ((n * c.T + t) * c.H + h) * c.D + i; };
        if (row < 0) {
          for (int64_t i = 0; i < c.D; ++i) {
            compare(value(p.out, c.values, out_at(i)), 0.0);
          }
          continue;
        }
        std::vector<bool> written(static_cast<size_t>(c.S), false);
        for (int64_t s = 0; s < c.S; ++s) {
          for (int64_t i = 0; i < c.D; ++i) {
            rows[static_cast<size_t>(s * c.D + i)] = value(bank, c.bank, bank.at(row, h, s, i));
          }
        }
        for (int64_t a = 0; a < c.W; ++a) {
          const int64_t s = slot(true, a);
          if (s >= 0 && !written[static_cast<size_t>(s)]) {
            written[static_cast<size_t>(s)] = true;
            const double g = value(p.g, DType::kF32, p.g.at(n, t, h, c.gate_per_write ? a : 0));
            for (int64_t i = 0; i < c.D; ++i) {
              rows[static_cast<size_t>(s * c.D + i)] *= std::exp(g);
            }
          }
        }
        const double beta = value(p.beta, DType::kF32, p.beta.at(n, t, h, 0));
        for (int64_t i = 0; i < c.D; ++i) {
          double error = value(p.v, c.values, p.v.at(n, t, h, i));
          for (int64_t a = 0; a < c.W; ++a) {
            const int64_t s = slot(true, a);
            if (s >= 0) {
              error -= value(p.write_val, c.values, p.write_val.at(n, t, h, a)) *
                       rows[static_cast<size_t>(s * c.D + i)];
            }
          }
          for (int64_t a = 0; a < c.W; ++a) {
            const int64_t s = slot(true, a);
            if (s >= 0) {
              rows[static_cast<size_t>(s * c.D + i)] +=
                  value(p.write_val, c.values, p.write_val.at(n, t, h, a)) * beta * error;
            }
          }
          double y = 0.0;
          for (int64_t b = 0; b < c.R; ++b) {
            const int64_t s = slot(false, b);
            if (s >= 0) {
              y += value(p.read_val, c.values, p.read_val.at(n, t, h, b)) *
                   rows[static_cast<size_t>(s * c.D + i)];
            }
          }
          compare(value(p.out, c.values, out_at(i)), y);
        }
        for (int64_t s = 0; s < c.S; ++s) {
          for (int64_t i = 0; written[static_cast<size_t>(s)] && i < c.D; ++i) {
            store_scalar(
                bank.host.data(),
                c.bank,
                bank.at(row, h, s, i),
                rows[static_cast<size_t>(s * c.D + i)]
            );
          }
        }
      }
    }
  }
  for (int64_t n = 0; n < p.pool; ++n) {
    for (int64_t h = 0; h < c.H; ++h) {
      for (int64_t s = 0; s < c.S; ++s) {
        for (int64_t i = 0; i < c.D; ++i) {
          const int64_t at = p.bank.at(n, h, s, i);
          compare(value(p.bank, c.bank, at), value(bank, c.bank, at));
        }
      }
    }
  }
  return worst;
}

constexpr int kLateTensors = 8;

struct LateTensors {
  const unsigned char* from[kLateTensors];
  unsigned char* to[kLateTensors];
  size_t bytes[kLateTensors];
};

// Lets the kernel after it start, waits until that has long looked, and only then writes.
__global__ void write_late(LateTensors late) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const long long start = clock64();
  while (clock64() - start < 100000) {
  }
  for (int k = 0; k < kLateTensors; ++k) {
    for (size_t i = threadIdx.x; i < late.bytes[k]; i += blockDim.x) {
      late.to[k][i] = late.from[k][i];
    }
  }
}

// The step of a token that is written only while the step's blocks are there already. Until then
// its tensors hold the same bytes in other places, one of them alone where `only` is not negative.
void run_late(Problem* p, int only) {
  Tensor* tensors[kLateTensors] = {
      &p->write_idx, &p->read_idx, &p->write_val, &p->read_val, &p->v, &p->beta, &p->g, &p->state
  };
  LateTensors late{};
  void* copies[kLateTensors] = {};
  for (int k = 0; k < kLateTensors; ++k) {
    const Bytes& right = tensors[k]->host;
    Bytes stale = right;
    if (only < 0 || only == k) {
      std::rotate(stale.begin(), stale.begin() + stale.size() / 16 * 8, stale.end());
    }
    check(cudaMalloc(&copies[k], right.size()), "cudaMalloc");
    check(cudaMemcpy(copies[k], right.data(), right.size(), cudaMemcpyHostToDevice), "copy in");
    check(
        cudaMemcpy(tensors[k]->device, stale.data(), stale.size(), cudaMemcpyHostToDevice),
        "copy in"
    );
    late.from[k] = static_cast<const unsigned char*>(copies[k]);
    late.to[k] = static_cast<unsigned char*>(tensors[k]->device);
    late.bytes[k] = right.size();
  }
  run(p, 0, p->c.N, 0, p->c.T, [&]() {
    write_late<<<1, 256>>>(late);
    check(cudaGetLastError(), "write_late");
  });
  for (void* copy : copies) {
    cudaFree(copy);
  }
}

int test_late(const Case& c) {
  Problem whole;
  make(c, &whole);
  run(&whole, 0, c.N, 0, c.T);
  int differ = 0;
  for (int only = -1; only < kLateTensors; ++only) {
    Problem late;
    make(c, &late);
    run_late(&late, only);
    differ += whole.bank.host != late.bank.host || whole.out.host != late.out.host;
    drop(&late);
  }
  std::printf("%-4s %-28s written late\n", differ == 0 ? "ok" : "FAIL", c.name);
  drop(&whole);
  return differ != 0;
}

int test_case(const Case& c) {
  Problem whole, parts;
  make(c, &whole);
  make(c, &parts);
  const Bytes start = whole.bank.host;
  run(&whole, 0, c.N, 0, c.T);
  const double worst = difference(whole, start);
  const DType low = c.bank == DType::kBf16 || c.values == DType::kBf16 ? DType::kBf16
                    : c.bank == DType::kF16 || c.values == DType::kF16 ? DType::kF16
                                                                       : DType::kF32;
  const double limit = low == DType::kBf16 ? 3e-2 : low == DType::kF16 ? 4e-3 : 2e-5;
  // sequence by sequence and token by token: other slices of columns, the same bits
  for (int64_t n = 0; n < c.N; ++n) {
    for (int64_t t = 0; t < c.T; ++t) {
      run(&parts, n, 1, t, 1);
    }
  }
  const bool same = whole.bank.host == parts.bank.host && whole.out.host == parts.out.host;
  const bool gaps = c.gap == 0 || [&] {  // what lies between rows keeps its bits
    const int64_t size = element_size(c.bank);
    for (int64_t row = 0; row < whole.pool * c.H * c.S; ++row) {
      for (int64_t i = (row * whole.bank.stride[2] + c.D) * size;
           i < (row + 1) * whole.bank.stride[2] * size;
           ++i) {
        if (whole.bank.host[static_cast<size_t>(i)] != 0xff) {
          return false;
        }
      }
    }
    return true;
  }();
  const bool ok = worst <= limit && same && gaps;
  std::printf(
      "%-4s %-28s difference %.1e%s%s\n",
      ok ? "ok" : "FAIL",
      c.name,
      worst,
      same ? "" : ", other bits in parts",
      gaps ? "" : ", gaps written"
  );
  drop(&whole);
  drop(&parts);
  return !ok;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const auto add = [&](Case c) { cases.push_back(c); };
  add({"small", 2, 3, 2, 4, 4, 16, 13});
  add({"odd columns", 2, 3, 2, 5, 3, 7, 11});
  add({"one column", 1, 2, 1, 1, 1, 1, 1});
  add({"bf16", 3, 4, 2, 16, 24, 128, 100, DType::kBf16, DType::kBf16, false, true});
  add({"f16", 3, 4, 2, 24, 16, 72, 100, DType::kF16, DType::kF16, true, false});
  add({"f32 bank, bf16 values", 2, 2, 2, 64, 64, 40, 400, DType::kF32, DType::kBf16});
  add({"bf16 bank, f32 values", 2, 2, 2, 64, 64, 80, 400, DType::kBf16});
  Case many{"many columns", 1, 2, 1, 64, 64, 1024, 200, DType::kBf16, DType::kBf16};
  add(many);
  many = {"many streams", 24, 1, 3, 17, 15, 200, 50, DType::kBf16, DType::kBf16};
  add(many);
  Case wide{"W = R = 128", 1, 2, 1, 128, 128, 64, 700, DType::kBf16, DType::kBf16};
  add(wide);
  wide = {"W = 200, R = 90", 1, 2, 1, 200, 90, 24, 700};
  add(wide);
  wide.ascending = true;
  wide.name = "W = 200, R = 90, ascending";
  wide.unused = wide.repeat = 0.0;
  add(wide);
  wide = {"W = 90, R = 300", 1, 2, 1, 90, 300, 24, 100};
  wide.ascending = false;
  wide.repeat = 0.7;
  add(wide);
  Case gates{"gate per write", 2, 4, 2, 12, 8, 32, 20};
  gates.gate_per_write = true;
  gates.repeat = 0.5;
  add(gates);
  Case ascending{"ascending", 2, 4, 2, 12, 12, 32, 14, DType::kF16, DType::kF32};
  ascending.ascending = true;
  ascending.gate_per_write = true;
  add(ascending);
  Case pool{"pool", 5, 3, 2, 8, 8, 24, 30};
  pool.pool = true;
  add(pool);
  pool.gap = 3;
  pool.name = "pool with gaps";
  add(pool);
  pool.gap = 8;
  pool.bank = pool.values = DType::kBf16;
  pool.name = "pool with aligned gaps";
  add(pool);
  Case few{"pool, few streams", 2, 1, 2, 64, 60, 300, 256, DType::kBf16, DType::kBf16};
  few.pool = true;
  add(few);
  few = {"streams for every processor", 12, 2, 2, 64, 64, 512, 256, DType::kBf16, DType::kBf16};
  add(few);
  Case unused{"all unused", 2, 2, 1, 8, 8, 16, 10};
  unused.unused = 1.1;
  add(unused);
  return cases;
}

}  // namespace
}  // namespace sdm::test

int main() {
  int failures = 0;
  for (const sdm::test::Case& c : sdm::test::all_cases()) {
    failures += sdm::test::test_case(c);
    failures += sdm::test::test_late(c);
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
