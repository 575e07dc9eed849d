// SPDX-License-Identifier: Apache-2.0
//! @file The CUDA top-k against a plain host version, bit for bit, and its speed.
//!
//! Standalone: returns 0 when every case agrees. Run with "time" it also times the two-factor
//! shapes. Build: nvcc -std=c++17 -O3 -I. -arch=sm_90 tests/cpp/test_topk.cu
//! sdm_kernels/topk/cuda/topk_*.cu
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#include "sdm_kernels/topk/cuda/topk_cuda.h"
#include "tests/cpp/device.h"
#include "tests/cpp/topk_reference.h"

namespace sdm::test {
namespace {

int g_failures = 0;
int g_cases = 0;

enum Kind {
  kNormal,
  kEqual,
  kEightLevels,
  kSpecials,
  kExponents,
  kUniform,
  kClose,
  kTails,
  kZeros,
  kNumKinds
};

float draw(Kind kind, std::mt19937& random) {
  std::normal_distribution<float> normal;
  switch (kind) {
    case kEqual:
      return 0.75f;
    case kEightLevels:
      return static_cast<float>(random() % 8) * 0.25f - 1.0f;
    case kSpecials: {
      constexpr float kInf = std::numeric_limits<float>::infinity();
      const float special[] = {kInf, -kInf, std::nanf(""), -std::nanf("1"), 0.0f, -0.0f, 1e-42f};
      const unsigned which = random() % 16;
      return which < 7 ? special[which] : normal(random);
    }
    case kExponents:
      return std::ldexp(random() % 2 ? 1.0f : -1.0f, static_cast<int>(random() % 254) - 126);
    case kUniform:
      return static_cast<float>(random() % 100000) * 1e-5f;
    case kClose:  // keys next to each other beside a far one: words lose their lowest bits
      return random() % 50 == 0 ? -1e6f : bits_float(0x3f800000u + random() % 4000);
    case kTails:
      return std::exp(4.0f * normal(random)) * (random() % 2 ? 1.0f : -1.0f);
    case kZeros:
      return random() % 2 ? 0.0f : -0.0f;
    default:
      return normal(random);
  }
}

enum Layout { kDense, kPadded, kTransposed, kExpanded };

template <typename T>
bool same(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <typename T>
constexpr DType dtype_of() {
  return std::is_same_v<T, float>  ? DType::kF32
         : std::is_same_v<T, Bf16> ? DType::kBf16
                                   : DType::kF16;
}

void report(
    bool ok, const char* what, const std::vector<int64_t>& dims, int64_t k, Kind kind, DType dtype
) {
  ++g_cases;
  if (ok) {
    return;
  }
  ++g_failures;
  std::printf(
      "WRONG %s: kind %d dtype %d k %d dims",
      what,
      kind,
      static_cast<int>(dtype),
      static_cast<int>(k)
  );
  for (size_t f = 0; f < std::min<size_t>(dims.size(), 8); ++f) {
    std::printf(" %d", static_cast<int>(dims[f]));
  }
  std::printf("\n");
}

// d_values and ids at every second place of their rows; some ids are outside or repeated.
template <typename T, typename Id>
void run_backward(
    const std::vector<int64_t>& dims,
    int64_t k,
    Kind kind,
    std::vector<int64_t> ids,
    int64_t rows,
    bool shuffled,
    std::mt19937& random
) {
  const int64_t kk = static_cast<int64_t>(ids.size()) / rows;
  if (shuffled) {
    for (int64_t& id : ids) {
      id = random() % 7 == 0 ? -1 : random() % 5 == 0 ? ids[random() % ids.size()] : id;
    }
    ids[0] = std::numeric_limits<Id>::max();
  }
  std::vector<T> d_values(ids.size() * 2);
  std::vector<Id> strided(ids.size() * 2, Id{0});
  for (size_t at = 0; at < ids.size(); ++at) {
    d_values[2 * at] = from_f32<T>(draw(kNormal, random));
    strided[2 * at] = static_cast<Id>(ids[at]);
  }
  int64_t num_columns = 0;
  for (const int64_t width : dims) {
    num_columns += width;
  }
  const DeviceArray<T> device_d_values(d_values);
  const DeviceArray<Id> device_ids(strided);
  const DeviceArray<T> device_d_scores(static_cast<size_t>(rows * num_columns));
  const int64_t row_stride = 2 * kk;
  TopkBwdParams params{};
  params.dtype = dtype_of<T>();
  params.factor_dims = dims.data();
  params.num_factors = static_cast<int64_t>(dims.size());
  params.num_selected = kk;
  params.num_rows = rows;
  params.d_values = device_d_values.data;
  params.d_values_rows = {1, &rows, &row_stride};
  params.d_values_stride = 2;
  params.indices = device_ids.data;
  params.indices_rows = {1, &rows, &row_stride};
  params.indices_stride = 2;
  params.wide_ids = sizeof(Id) == 8;
  params.d_scores = device_d_scores.data;
  check(launch_topk_bwd(params, nullptr), "launch_topk_bwd");
  const std::vector<T> got = device_d_scores.host();
  bool ok = true;
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<T> row_values;
    std::vector<int64_t> row_ids;
    for (int64_t lane = 0; lane < kk; ++lane) {
      row_values.push_back(d_values[static_cast<size_t>(row * row_stride + 2 * lane)]);
      row_ids.push_back(ids[static_cast<size_t>(row * kk + lane)]);
    }
    const std::vector<T> want = scatter_reference(row_values, row_ids, dims);
    for (int64_t column = 0; column < num_columns; ++column) {
      ok = ok && same(
                     got[static_cast<size_t>(row * num_columns + column)],
                     want[static_cast<size_t>(column)]
                 );
    }
  }
  report(ok, "gradient", dims, k, kind, params.dtype);
}

template <typename T, typename Id>
void run_case(
    const std::vector<int64_t>& dims,
    int64_t k,
    Kind kind,
    Layout layout,
    int64_t rows,
    int64_t num_slots
) {
  std::mt19937 random(
      static_cast<uint32_t>(
          k * 131 + dims[0] * 7 + static_cast<int64_t>(dims.size()) * 3 + kind * 17 + layout
      )
  );
  int64_t num_columns = 0;
  for (const int64_t width : dims) {
    num_columns += width;
  }
  const int64_t kk = std::min(k, num_slots);
  // [2, rows] rows in all, at any strides.
  const int64_t sizes[2] = {2, rows};
  const int64_t pitch = num_columns + (layout == kPadded ? 5 : 0);
  int64_t strides[2] = {rows * pitch, pitch};
  if (layout == kTransposed) {
    strides[0] = pitch;
    strides[1] = 2 * pitch;
  } else if (layout == kExpanded) {
    strides[0] = 0;
  }
  std::vector<T> scores(static_cast<size_t>(2 * rows * pitch));
  for (T& score : scores) {
    score = from_f32<T>(draw(kind, random));
  }
  const DeviceArray<T> device_scores(scores);
  const DeviceArray<T> device_values(static_cast<size_t>(2 * rows * kk));
  const DeviceArray<Id> device_ids(static_cast<size_t>(2 * rows * kk));
  TopkFwdParams params{};
  params.dtype = dtype_of<T>();
  params.factor_dims = dims.data();
  params.num_factors = static_cast<int64_t>(dims.size());
  params.num_selected = kk;
  params.num_rows = 2 * rows;
  params.scores = device_scores.data;
  params.scores_rows = {2, sizes, strides};
  params.values = device_values.data;
  params.indices = device_ids.data;
  params.wide_ids = sizeof(Id) == 8;
  check(launch_topk_fwd(params, nullptr), "launch_topk_fwd");
  const std::vector<T> got_values = device_values.host();
  const std::vector<Id> got_ids = device_ids.host();
  bool ok = true;
  std::vector<int64_t> all_ids;
  for (int64_t row = 0; row < 2 * rows; ++row) {
    std::vector<T> values;
    std::vector<int64_t> ids;
    select_reference(scores.data() + params.scores_rows.offset(row), dims, k, &values, &ids);
    for (int64_t place = 0; place < kk; ++place) {
      const size_t at = static_cast<size_t>(row * kk + place);
      ok = ok && got_ids[at] == static_cast<Id>(ids[static_cast<size_t>(place)]) &&
           same(got_values[at], values[static_cast<size_t>(place)]);
    }
    all_ids.insert(all_ids.end(), ids.begin(), ids.end());
  }
  report(ok, "selection", dims, k, kind, params.dtype);
  run_backward<T, Id>(dims, k, kind, all_ids, 2 * rows, kind % 2 == 1, random);
  if (sizeof(Id) == 4 && kind == kNormal) {
    run_backward<T, int64_t>(dims, k, kind, all_ids, 2 * rows, true, random);
  }
}

template <typename T>
void run_dtype(const std::vector<int64_t>& dims, int64_t k, int64_t rows) {
  int64_t num_slots = 1;
  for (const int64_t width : dims) {
    num_slots *= width;
  }
  for (int kind = 0; kind < kNumKinds; ++kind) {
    const Layout layout = static_cast<Layout>((kind + k) % 4);
    if (num_slots > INT32_MAX) {
      run_case<T, int64_t>(dims, k, static_cast<Kind>(kind), layout, rows, num_slots);
    } else {
      run_case<T, int32_t>(dims, k, static_cast<Kind>(kind), layout, rows, num_slots);
    }
  }
}

void run(const std::vector<int64_t>& dims, int64_t k, int64_t rows) {
  run_dtype<float>(dims, k, rows);
  run_dtype<Bf16>(dims, k, rows);
  run_dtype<F16>(dims, k, rows);
}

template <typename Launch>
float time_launch(Launch launch) {
  Stopwatch time;
  float best = 1e30f;
  for (int repeat = 0; repeat < 20; ++repeat) {
    best = std::min(best, time(launch));
  }
  return best;
}

template <typename T>
void time_shape(int64_t width, int64_t k, Kind kind, const char* name) {
  const int64_t rows = 65536;
  const std::vector<int64_t> dims{width, width};
  const int64_t stride = 2 * width;
  std::mt19937 random(1);
  std::vector<T> scores(static_cast<size_t>(rows * stride));
  for (T& score : scores) {
    score = from_f32<T>(draw(kind, random));
  }
  const DeviceArray<T> device_scores(scores);
  const DeviceArray<T> values(static_cast<size_t>(rows * k));
  const DeviceArray<int32_t> ids(static_cast<size_t>(rows * k));
  const TopkRows score_rows{1, &rows, &stride};
  const TopkRows slot_rows{1, &rows, &k};
  const TopkFwdParams fwd{
      dtype_of<T>(),
      dims.data(),
      2,
      k,
      rows,
      device_scores.data,
      score_rows,
      values.data,
      ids.data,
      false
  };
  const TopkBwdParams bwd{
      dtype_of<T>(),
      dims.data(),
      2,
      k,
      rows,
      values.data,
      slot_rows,
      1,
      ids.data,
      slot_rows,
      1,
      false,
      device_scores.data
  };
  const float fwd_ms = time_launch([&] { return launch_topk_fwd(fwd, nullptr); });
  const float bwd_ms = time_launch([&] { return launch_topk_bwd(bwd, nullptr); });
  std::printf(
      "%s %s 65536 x (%d, %d) k %d: forward %.4f ms, backward %.4f ms\n",
      sizeof(T) == 4 ? "f32 " : "bf16",
      name,
      static_cast<int>(width),
      static_cast<int>(width),
      static_cast<int>(k),
      fwd_ms,
      bwd_ms
  );
}

void time_shapes() {
  for (const int64_t k : {64, 32, 128, 256}) {
    time_shape<float>(256, k, kNormal, "normal");
    time_shape<Bf16>(256, k, kNormal, "normal");
  }
  time_shape<float>(256, 64, kEqual, "equal");
  time_shape<float>(256, 64, kTails, "tails");
  for (const int64_t width : {128, 512, 1024}) {
    time_shape<float>(width, 64, kNormal, "normal");
    time_shape<Bf16>(width, 64, kNormal, "normal");
  }
}

int main_test(bool timed) {
  // Warp per row.
  for (const int64_t k : {1, 2, 15, 31, 32, 33, 48, 64, 65, 100, 128, 129, 200, 255, 256}) {
    run({256, 256}, k, 3);
  }
  for (const int64_t k : {1, 8, 64, 128, 256}) {
    run({1, 1}, k, 1);
    run({3, 100}, k, 2);
    run({100, 1}, k, 2);
    run({31, 33}, k, 2);
    run({64, 32}, k, 2);
    run({129, 256}, k, 2);
    run({257, 65}, k, 2);
    run({512, 384}, k, 2);
    run({1024, 1024}, k, 2);
    run({1000, 7}, k, 2);
  }
  // Block per row.
  for (const int64_t k : {1, 9, 64, 300, 1024}) {
    run({1}, k, 1);
    run({70}, k, 2);
    run({257}, k, 2);
    run({256, 256}, k, 1);
    run({1025, 3}, k, 1);
    run({8, 9, 10}, k, 1);
    run({40, 1, 33}, k, 1);
    run({5, 4, 3, 6}, k, 1);
    run({46340, 46341}, k, 1);
    run({70000}, k, 1);
    run({70000, 3}, k, 1);
    run({1000, 1000, 1000, 1000}, k, 1);
    run(std::vector<int64_t>(30, 2), k, 1);
    run(std::vector<int64_t>(62, 2), k, 1);
  }
  run(std::vector<int64_t>(512, 1), 5, 1);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::printf("%d cases, %d wrong\n", g_cases, g_failures);
  if (timed) {
    time_shapes();
  }
  return g_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace sdm::test

int main(int argc, char** argv) {
  return sdm::test::main_test(argc > 1 && std::string(argv[1]) == "time");
}
