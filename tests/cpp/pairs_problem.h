// SPDX-License-Identifier: Apache-2.0
//! @file Random problems for test_pairs.cu: inputs, records and dots of a window on the device, and
//! the gradients in plain double on the host. Unused memory holds NaN, so that reading it shows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "sdm_kernels/sdm/cuda/sdm_pairs.h"

namespace pairs_test {

using namespace sdm;

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::printf("%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
  }
}

struct Buffers {
  std::vector<void*> all;

  ~Buffers() {
    for (void* data : all) {
      cudaFree(data);
    }
  }

  void* bytes(size_t count) {
    void* data = nullptr;
    check(cudaMalloc(&data, std::max<size_t>(count, 16)), "cudaMalloc");
    all.push_back(data);
    return data;
  }

  template <typename X>
  X* copy(const std::vector<X>& host) {
    X* data = static_cast<X*>(bytes(host.size() * sizeof(X)));
    check(cudaMemcpy(data, host.data(), host.size() * sizeof(X), cudaMemcpyHostToDevice), "copy");
    return data;
  }
};

inline std::vector<unsigned char> pack(const std::vector<double>& values, DType dtype) {
  std::vector<unsigned char> out(values.size() * static_cast<size_t>(element_size(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    store_scalar(out.data(), dtype, static_cast<int64_t>(i), values[i]);
  }
  return out;
}

inline std::mt19937_64 rng(1);

inline double uniform(double low, double high) {
  return low + (high - low) * static_cast<double>(rng() >> 11) * 0x1p-53;
}

inline double round_to(double x, DType dtype) {
  unsigned char raw[8];
  store_scalar(raw, dtype, 0, x);
  return load_scalar(raw, dtype, 0);
}

struct Case {
  const char* name;
  int64_t B, T, H, W, R, D, S, C;
  bool gate_per_write;
  DType bank, values, d_out;  // values: dtype of weights, beta and gates
  int64_t slices;
  double unused, hot;  // chance of a lane without a slot, and of slot 0
  bool distinct;       // no slot twice in a token
  double gate_low, gate_high;
  std::vector<int64_t> cu_seqlens;  // empty: sequence n is batch row n
};

// A [B, T, H, width] tensor, on the host in that order and on the device in [B, H, T, width + 1].
struct Tensor {
  std::vector<double> x;
  FloatView view;

  void make(Buffers* device, const Case& c, int64_t width, DType dtype, double low, double high) {
    x.resize(static_cast<size_t>(c.B * c.T * c.H * width));
    for (double& value : x) {
      value = round_to(uniform(low, high), dtype);
    }
    const int64_t ld = width + 1;
    std::vector<double> laid(static_cast<size_t>(c.B * c.T * c.H * ld), NAN);
    for (int64_t b = 0; b < c.B; ++b) {
      for (int64_t t = 0; t < c.T; ++t) {
        for (int64_t h = 0; h < c.H; ++h) {
          for (int64_t a = 0; a < width; ++a) {
            laid[static_cast<size_t>(((b * c.H + h) * c.T + t) * ld + a)] =
                x[static_cast<size_t>(((b * c.T + t) * c.H + h) * width + a)];
          }
        }
      }
    }
    view = {device->copy(pack(laid, dtype)), dtype, {c.H * c.T * ld, ld, c.T * ld, 1}};
  }
};

struct Problem {
  Case c;
  Buffers device;
  SdmCudaInputs inputs = {};
  std::vector<SdmSequence> sequences;
  std::vector<int64_t> write_idx, read_idx;  // [B, T, H, W or R]
  Tensor k, q, beta, g, d_out;
  std::vector<float> errors;
  float* device_errors = nullptr;
  int64_t most_chunks = 0;
};

inline void make_indices(const Case& c, int64_t lanes, std::vector<int64_t>* out) {
  out->assign(static_cast<size_t>(c.B * c.T * c.H * lanes), -1);
  for (size_t at = 0; at < out->size(); at += static_cast<size_t>(lanes)) {
    for (int64_t a = 0; a < lanes; ++a) {
      int64_t slot = uniform(0, 1) < c.hot ? 0 : static_cast<int64_t>(uniform(0, c.S));
      if (uniform(0, 1) < c.unused) {
        continue;
      }
      const auto first = out->begin() + static_cast<int64_t>(at);
      if (c.distinct && std::find(first, first + a, slot) != first + a) {
        continue;
      }
      first[a] = slot;
    }
  }
}

inline void make_problem(const Case& c, Problem* p) {
  p->c = c;
  SdmDims& dims = p->inputs.dims;
  const int64_t N = c.cu_seqlens.empty() ? c.B : static_cast<int64_t>(c.cu_seqlens.size()) - 1;
  dims = {c.B, c.T, c.H, c.W, c.R, c.D, c.S, N, c.C, c.gate_per_write};
  p->inputs.bank_dtype = c.bank;
  for (int64_t n = 0; n < N; ++n) {
    SdmSequence s = {n, 0, c.T, n, 0, 0, 0};
    if (!c.cu_seqlens.empty()) {
      s.batch = 0;
      s.begin = c.cu_seqlens[static_cast<size_t>(n)];
      s.length = c.cu_seqlens[static_cast<size_t>(n) + 1] - s.begin;
    }
    s.num_chunks = ceil_div(s.length, c.C);
    p->most_chunks = std::max(p->most_chunks, s.num_chunks);
    p->sequences.push_back(s);
  }
  p->inputs.sequences = p->device.copy(p->sequences);
  make_indices(c, c.W, &p->write_idx);
  make_indices(c, c.R, &p->read_idx);
  p->k.make(&p->device, c, c.W, c.values, -1, 1);
  p->q.make(&p->device, c, c.R, c.values, -1, 1);
  p->beta.make(&p->device, c, 1, c.values, 0, 1);
  p->g.make(&p->device, c, c.gate_per_write ? c.W : 1, c.values, c.gate_low, c.gate_high);
  p->d_out.make(&p->device, c, c.D, c.d_out, -1, 1);
  p->inputs.tokens.write_val = p->k.view;
  p->inputs.tokens.read_val = p->q.view;
  p->inputs.tokens.beta = p->beta.view;
  p->inputs.tokens.g = p->g.view;
  p->errors.resize(static_cast<size_t>(c.B * c.T * c.H * c.D));
  for (float& x : p->errors) {
    // exact in tf32 for 16-bit banks, whose products have one term
    x = static_cast<float>(round_to(uniform(-1, 1), c.bank));
  }
  p->device_errors = p->device.copy(p->errors);
}

struct Grads {
  std::vector<double> d_k, d_q, d_beta, d_g;
};

// Random numbers that depend only on where they stand, so that all windows see the same.
inline double hashed(int64_t kind, int64_t n, int64_t chunk, int64_t head, int64_t at) {
  uint64_t x = static_cast<uint64_t>(kind);
  for (const int64_t y : {n, chunk, head, at}) {
    x = (x ^ static_cast<uint64_t>(y)) * 0x9e3779b97f4a7c15u;
    x ^= x >> 29;
  }
  return static_cast<double>(x >> 40) * 0x1p-23 - 1.0;
}

struct Entry {
  int64_t slot, lane, token;
  double weight;
  bool write, owner;
  double log_decay, gate;
  int64_t back;  // entries of the group before it
};

struct WindowData {
  bool plain_dots = false;  // zeros, where only the time is wanted
  SdmRecords records = {};
  SdmDots dots = {};
};

// Builds the records and dots of a window on the device, and adds its part of the reference.
inline void make_window(
    Problem* p, const SdmWindow& window, Buffers* device, WindowData* out, Grads* ref
) {
  const Case& c = p->c;
  const SdmDims& dims = p->inputs.dims;
  const int64_t num_q = dims.N * window.chunks * c.H, n = c.C * (c.W + c.R), cw = c.C * c.W;
  const int64_t Cp = round_up(c.C, 16);
  const size_t all = static_cast<size_t>(num_q * n);
  std::vector<int32_t> position(all, 0x7fffffff);
  std::vector<int4> entry(all, make_int4(-1, -1, -1, -1)), group(all, make_int4(-1, -1, -1, -1));
  std::vector<SdmPair> pair(all, SdmPair{NAN, ~0u, NAN});
  std::vector<int32_t> entry_group(all, -1), entry_count(static_cast<size_t>(num_q), 0);
  std::vector<float> group_decay(all, NAN), beta(static_cast<size_t>(num_q * c.C), NAN);
  std::vector<int2> count(static_cast<size_t>(num_q), make_int2(0, 0));
  const int64_t slices = out->plain_dots ? 0 : c.slices, D = out->plain_dots ? 0 : c.D;
  std::vector<float> error_grad(static_cast<size_t>(slices * num_q * cw), NAN);
  std::vector<float> row_dot(static_cast<size_t>(slices) * all, NAN), decay_dot(row_dot);
  std::vector<float> d_v(static_cast<size_t>(num_q * c.C * D), NAN);

  for (int64_t q = 0; q < num_q; ++q) {
    ChunkPlace place;
    if (!find_chunk(dims, p->sequences.data(), window, q, &place)) {
      continue;
    }
    const int64_t seq = q / (dims.H * window.chunks);
    const int64_t chunk = q / dims.H % window.chunks + window.first_chunk;
    const int64_t tokens = place.num_tokens;
    const auto token_at = [&](int64_t i) {
      return (place.batch * c.T + place.token + i) * c.H + place.head;
    };
    const auto hash = [&](int64_t kind, int64_t at) {
      return hashed(kind, seq, chunk, place.head, at);
    };
    for (int64_t i = 0; i < tokens; ++i) {
      beta[static_cast<size_t>(q * c.C + i)] =
          static_cast<float>(p->beta.x[static_cast<size_t>(token_at(i))]);
      for (int64_t d = 0; d < D; ++d) {
        d_v[static_cast<size_t>((q * c.C + i) * c.D + d)] =
            static_cast<float>(round_to(hash(1, i * c.D + d), c.bank));
      }
    }
    std::vector<Entry> entries;
    for (int64_t lane = 0; lane < n; ++lane) {
      const bool write = lane < cw;
      const int64_t width = write ? c.W : c.R, at = write ? lane : lane - cw;
      const int64_t token = at / width, a = at % width;
      position[static_cast<size_t>(q * n + lane)] = -1;
      if (token >= tokens) {
        continue;
      }
      const size_t from = static_cast<size_t>(token_at(token) * width + a);
      const int64_t slot = write ? p->write_idx[from] : p->read_idx[from];
      if (slot >= 0) {
        entries.push_back(
            {slot, lane, token, (write ? p->k : p->q).x[from], write, false, 0, 0, 0}
        );
      }
    }
    std::stable_sort(entries.begin(), entries.end(), [](const Entry& x, const Entry& y) {
      return x.slot != y.slot ? x.slot < y.slot : x.lane < y.lane;
    });
    std::vector<int4> with, without;
    const int64_t size = static_cast<int64_t>(entries.size());
    for (int64_t begin = 0, end; begin < size; begin = end) {
      int64_t mid = begin;
      for (end = begin; end < size && entries[end].slot == entries[begin].slot; ++end) {
        mid += entries[end].write ? 1 : 0;
      }
      double sum = 0;
      for (int64_t w = begin; w < mid; ++w) {
        Entry& e = entries[w];
        e.owner = w == begin || entries[w - 1].token != e.token;
        if (e.owner) {
          const int64_t t = token_at(e.token);
          e.gate = p->g.x[static_cast<size_t>(c.gate_per_write ? t * c.W + e.lane % c.W : t)];
        }
        sum += e.gate;
        e.log_decay = sum;
      }
      for (int64_t e = begin; e < end; ++e) {
        entries[e].back = e - begin;
      }
      for (int64_t r = mid; r < end; ++r) {
        for (int64_t w = begin; w < mid && entries[w].token <= entries[r].token; ++w) {
          entries[r].log_decay = entries[w].log_decay;
        }
      }
      const int4 g = make_int4(
          static_cast<int>(entries[begin].slot),
          static_cast<int>(begin),
          static_cast<int>(mid - begin),
          static_cast<int>(end - mid)
      );
      (mid > begin ? with : without).push_back(g);
    }
    count[static_cast<size_t>(q)] =
        make_int2(static_cast<int>(with.size()), static_cast<int>(with.size() + without.size()));
    with.insert(with.end(), without.begin(), without.end());
    entry_count[static_cast<size_t>(q)] = static_cast<int32_t>(size);
    for (size_t at = 0; at < with.size(); ++at) {
      for (int e = with[at].y; e < with[at].y + with[at].z + with[at].w; ++e) {
        entry_group[static_cast<size_t>(q * n + e)] = static_cast<int32_t>(at);
      }
    }
    std::vector<double> row(entries.size()), eg(entries.size());
    for (int64_t e = 0; e < size; ++e) {
      const Entry& x = entries[e];
      const int row_id = static_cast<int>(x.write ? x.token : c.C + x.token);
      position[static_cast<size_t>(q * n + x.lane)] = static_cast<int32_t>(e);
      entry[static_cast<size_t>(q * n + e)] =
          make_int4(row_id | (x.owner ? kOwnerBit : 0), -1, -1, static_cast<int>(x.lane));
      pair[static_cast<size_t>(q * n + e)] = {
          static_cast<float>(x.weight),
          static_cast<uint32_t>(x.token) | static_cast<uint32_t>(x.back) << kPairTokenBits,
          x.log_decay
      };
      for (int64_t s = 0; s < slices; ++s) {
        const float dot = static_cast<float>(hash(2, e * c.slices + s));
        row_dot[static_cast<size_t>((s * num_q + q) * n + e)] = dot;
        row[e] += dot;
        if (x.write) {
          const float dot_e = static_cast<float>(hash(3, e * c.slices + s));
          error_grad[static_cast<size_t>((s * num_q + q) * cw + x.lane)] = dot_e;
          eg[e] += dot_e;
        }
      }
    }

    // reference
    std::vector<double> ve(static_cast<size_t>(c.C * c.C), NAN), ge(ve), d_beta(tokens),
        d_g(tokens);
    const auto product = [&](bool read, int64_t i, int64_t j) {
      double& x = (read ? ge : ve)[static_cast<size_t>(i * c.C + j)];
      if (std::isnan(x)) {
        x = 0;
        for (int64_t d = 0; d < c.D; ++d) {
          x += (read ? p->d_out.x[static_cast<size_t>(token_at(i) * c.D + d)]
                     : d_v[static_cast<size_t>((q * c.C + i) * c.D + d)]) *
               p->errors[static_cast<size_t>(token_at(j) * c.D + d)];
        }
      }
      return x;
    };
    for (size_t at = 0; at < with.size(); ++at) {
      const int64_t begin = with[at].y, mid = begin + with[at].z, end = mid + with[at].w;
      group[static_cast<size_t>(q * n) + at] = with[at];
      double d_decay = 0;
      const double total = mid > begin ? entries[mid - 1].log_decay : 0;
      group_decay[static_cast<size_t>(q * n) + at] = static_cast<float>(std::exp(total));
      for (int64_t s = 0; s < slices && mid > begin; ++s) {
        const float dot = static_cast<float>(hash(4, static_cast<int64_t>(at) * c.slices + s));
        decay_dot[static_cast<size_t>((s * num_q + q) * n) + at] = dot;
        d_decay += dot * std::exp(total);
      }
      if (ref == nullptr) {
        continue;
      }
      const size_t len = static_cast<size_t>(end - begin);
      std::vector<double> d_w(len), d_before(len), d_after(len);
      for (int64_t r = begin; r < end; ++r) {
        const Entry& x = entries[r];
        const double before = std::exp(x.log_decay);
        double change = x.write ? -row[r] * before : row[r] * before;
        d_w[r - begin] += change;
        d_before[r - begin] += x.weight * change;
        if (x.write) {
          const double after = std::exp(total - x.log_decay);
          const double b = beta[static_cast<size_t>(q * c.C + x.token)];
          change = b * eg[r] * after;
          d_w[r - begin] += change;
          d_after[r - begin] += x.weight * change;
          d_beta[x.token] += x.weight * eg[r] * after;
        }
        for (int64_t e = begin; e < std::min(r, mid); ++e) {
          const Entry& y = entries[e];
          if (x.write ? y.token >= x.token : y.token > x.token) {
            continue;
          }
          bool gated = false;
          for (int64_t z = e + 1; z < mid; ++z) {
            gated = gated || (entries[z].owner && entries[z].token <= x.token);
          }
          const double sign = x.write ? -1 : 1;
          const double through =
              sign * product(!x.write, x.token, y.token) * std::exp(x.log_decay - y.log_decay);
          const double d_pair = through * beta[static_cast<size_t>(q * c.C + y.token)];
          d_w[r - begin] += d_pair * y.weight;
          d_w[e - begin] += d_pair * x.weight;
          d_beta[y.token] += through * x.weight * y.weight;
          if (gated) {
            d_before[r - begin] += d_pair * x.weight * y.weight;
            d_before[e - begin] -= d_pair * x.weight * y.weight;
          }
        }
      }
      for (int64_t w = begin; w < end; ++w) {
        const Entry& x = entries[w];
        const int64_t width = x.write ? c.W : c.R;
        const int64_t lane = (x.write ? x.lane : x.lane - cw) % width;
        const size_t to = static_cast<size_t>(token_at(x.token) * width + lane);
        (x.write ? ref->d_k : ref->d_q)[to] = d_w[w - begin];
        if (!x.owner) {
          continue;
        }
        double gate = d_decay;
        for (int64_t e = begin; e < end; ++e) {
          const bool later = e < mid ? e >= w : entries[e].token >= x.token;
          gate += later ? d_before[e - begin] : 0;
          gate += e < w ? d_after[e - begin] : 0;
        }
        if (c.gate_per_write) {
          ref->d_g[to] = gate;
        }
        d_g[x.token] += gate;
      }
    }
    for (int64_t i = 0; i < tokens && ref != nullptr; ++i) {
      ref->d_beta[static_cast<size_t>(token_at(i))] = d_beta[i];
      if (!c.gate_per_write) {
        ref->d_g[static_cast<size_t>(token_at(i))] = d_g[i];
      }
    }
  }
  SdmRecords& r = out->records;
  r.num_q = num_q;
  r.n = static_cast<int32_t>(n);
  r.Cp = static_cast<int32_t>(Cp);
  r.position = device->copy(position);
  r.entry = device->copy(entry);
  r.pair = device->copy(pair);
  r.entry_group = device->copy(entry_group);
  r.entry_count = device->copy(entry_count);
  r.group = device->copy(group);
  r.group_decay = device->copy(group_decay);
  r.group_count = device->copy(count);
  r.beta = device->copy(beta);
  const auto dots = [&](const std::vector<float>& host, int64_t count) {
    if (!out->plain_dots) {
      return device->copy(host);
    }
    const size_t bytes = static_cast<size_t>(count) * sizeof(float);
    float* data = static_cast<float*>(device->bytes(bytes));
    check(cudaMemset(data, 0, bytes), "memset");
    return data;
  };
  out->dots = {
      c.slices,
      c.slices,
      dots(error_grad, c.slices * num_q * cw),
      dots(row_dot, c.slices * num_q * n),
      dots(decay_dot, c.slices * num_q * n),
      dots(d_v, num_q * c.C * c.D),
  };
}

}  // namespace pairs_test
