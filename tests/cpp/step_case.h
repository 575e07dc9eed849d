// SPDX-License-Identifier: Apache-2.0
//! @file Random cases of the decode step on the device.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include <cuda_runtime.h>

#include "sdm_kernels/sdm/cuda/sdm_cuda.h"

namespace sdm::test {

using Bytes = std::vector<uint8_t>;

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::printf("%s: %s\n", what, cudaGetErrorString(error));
    std::exit(2);
  }
}

struct Case {
  const char* name;
  int64_t N, T, H, W, R, D, S;
  DType bank = DType::kF32;
  DType values = DType::kF32;  // of write_val, read_val and v
  bool write_int64 = true;
  bool read_int64 = true;
  bool gate_per_write = false;
  bool ascending = false;  // ids of a token, without repeats
  double unused = 0.1;     // share of ids outside the bank
  double repeat = 0.2;     // share of ids equal to another lane's
  bool pool = false;       // state indices, some -1
  int64_t gap = 0;         // elements between the rows of every tensor
};

// A tensor [N, T, H, last] with gaps between its rows.
struct Tensor {
  Bytes host;
  void* device = nullptr;
  int64_t stride[4];

  void upload() {
    check(cudaMalloc(&device, std::max<size_t>(host.size(), 1)), "cudaMalloc");
    check(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice), "copy in");
  }

  void download() {
    check(cudaMemcpy(host.data(), device, host.size(), cudaMemcpyDeviceToHost), "copy out");
  }

  void shape(const int64_t (&sizes)[4], int64_t gap, int64_t size) {
    stride[3] = 1;
    stride[2] = sizes[3] + gap;
    stride[1] = stride[2] * sizes[2];
    stride[0] = stride[1] * sizes[1];
    host.assign(static_cast<size_t>(stride[0] * sizes[0] * size), 0xff);
  }

  int64_t at(int64_t a, int64_t b, int64_t c, int64_t d) const {
    return a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3];
  }
};

struct Problem {
  Case c;
  int64_t pool;
  std::vector<int64_t> rows;  // of the pool, by sequence
  Tensor write_idx, read_idx, write_val, read_val, v, beta, g, bank, out, state;

  std::array<Tensor*, 10> tensors() {
    return {&write_idx, &read_idx, &write_val, &read_val, &v, &beta, &g, &bank, &out, &state};
  }
};

inline int64_t id_of(const Tensor& x, bool wide, int64_t at) {
  int64_t id = 0;
  if (wide) {
    std::memcpy(&id, x.host.data() + at * 8, 8);
    return id;
  }
  int32_t narrow = 0;
  std::memcpy(&narrow, x.host.data() + at * 4, 4);
  return narrow;
}

inline void set_id(Tensor* x, bool wide, int64_t at, int64_t id) {
  const int32_t narrow = static_cast<int32_t>(id);
  std::memcpy(
      x->host.data() + at * (wide ? 8 : 4),
      wide ? static_cast<const void*>(&id) : &narrow,
      wide ? 8 : 4
  );
}

inline void draw_ids(Tensor* x, const Case& c, bool wide, int64_t lanes, std::mt19937_64* random) {
  std::uniform_real_distribution<double> uniform;
  std::uniform_int_distribution<int64_t> slot(0, c.S - 1);
  x->shape({c.N, c.T, c.H, lanes}, c.gap, wide ? 8 : 4);
  const int64_t outside[] = {-1, c.S, -c.S, INT32_MAX, wide ? int64_t{1} << 32 : -2};
  for (int64_t row = 0; row < c.N * c.T * c.H; ++row) {
    std::vector<int64_t> ids(static_cast<size_t>(lanes));
    for (size_t a = 0; a < ids.size(); ++a) {
      const double kind = uniform(*random);
      ids[a] = kind < c.unused                       ? outside[(*random)() % 5]
               : kind < c.unused + c.repeat && a > 0 ? ids[(*random)() % a]
                                                     : slot(*random);
    }
    if (c.ascending) {
      std::vector<int64_t> all(static_cast<size_t>(c.S));
      for (size_t s = 0; s < all.size(); ++s) {
        all[s] = static_cast<int64_t>(s);
      }
      std::shuffle(all.begin(), all.end(), *random);
      std::copy(all.begin(), all.begin() + lanes, ids.begin());
      std::sort(ids.begin(), ids.end());
    }
    for (int64_t a = 0; a < lanes; ++a) {
      set_id(x, wide, row * x->stride[2] + a, ids[static_cast<size_t>(a)]);
    }
  }
}

inline void draw_floats(
    Tensor* x,
    const int64_t (&sizes)[4],
    int64_t gap,
    DType dtype,
    double low,
    double high,
    std::mt19937_64* random
) {
  std::uniform_real_distribution<double> uniform(low, high);
  x->shape(sizes, gap, element_size(dtype));
  for (int64_t row = 0; row < sizes[0] * sizes[1] * sizes[2]; ++row) {
    for (int64_t i = 0; i < sizes[3]; ++i) {
      store_scalar(x->host.data(), dtype, row * x->stride[2] + i, uniform(*random));
    }
  }
}

inline double value(const Tensor& x, DType dtype, int64_t at) {
  return load_scalar(x.host.data(), dtype, at);
}

inline void make(const Case& c, Problem* p) {
  std::mt19937_64 random(99);
  p->c = c;
  p->pool = c.pool ? c.N + 2 : c.N;
  draw_ids(&p->write_idx, c, c.write_int64, c.W, &random);
  draw_ids(&p->read_idx, c, c.read_int64, c.R, &random);
  const double w = 2.0 / static_cast<double>(c.W), r = 2.0 / static_cast<double>(c.R);
  draw_floats(&p->write_val, {c.N, c.T, c.H, c.W}, c.gap, c.values, -w / 4, w, &random);
  draw_floats(&p->read_val, {c.N, c.T, c.H, c.R}, c.gap, c.values, -r / 4, r, &random);
  draw_floats(&p->v, {c.N, c.T, c.H, c.D}, c.gap, c.values, -1, 1, &random);
  draw_floats(&p->beta, {c.N, c.T, c.H, 1}, c.gap, DType::kF32, 0, 1, &random);
  const int64_t gates = c.gate_per_write ? c.W : 1;
  draw_floats(&p->g, {c.N, c.T, c.H, gates}, c.gap, DType::kF32, -1, 0, &random);
  draw_floats(&p->bank, {p->pool, c.H, c.S, c.D}, c.gap, c.bank, -1, 1, &random);
  p->out.shape({c.N, c.T, c.H, c.D}, 0, element_size(c.values));
  p->state.shape({1, 1, 1, c.N}, 0, 8);
  for (int64_t n = 0; n < c.N; ++n) {
    p->rows.push_back(c.pool ? (n % 3 == 1 ? -1 : p->pool - 1 - n) : n);
    set_id(&p->state, true, n, p->rows.back());
  }
  for (Tensor* x : p->tensors()) {
    x->upload();
  }
}

inline void drop(Problem* p) {
  for (Tensor* x : p->tensors()) {
    cudaFree(x->device);
  }
}

}  // namespace sdm::test
