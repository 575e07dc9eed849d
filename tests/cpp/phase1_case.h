// SPDX-License-Identifier: Apache-2.0
//! @file Random inputs of the phase 1 test, on the host and on the device.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "sdm_kernels/sdm/cuda/sdm_phase1.h"
#include "tests/cpp/device.h"

namespace sdm::test {

struct Case {
  const char* name;
  int64_t B, T, H, W, R, S, C;
  bool per_write = false;
  bool write_int64 = false;
  bool read_int64 = false;
  DType dtype = DType::kF32;
  std::vector<int64_t> lengths = {};  // packed sequences
  bool skip_some = false;             // state indices with -1
  double unused = 0.05;               // share of ids outside the bank
  double hot = 0.0;                   // share of ids that name slot S / 2
  double repeat = 0.1;                // share of ids equal to their left neighbour
  double gate = 0.5;                  // gates in [-gate, gate / 8], large ones in [-gate, 0]
  int64_t window = 3;
};

using Bytes = std::vector<uint8_t>;

inline Bytes pack_floats(const std::vector<double>& values, DType dtype) {
  Bytes bytes(values.size() * static_cast<size_t>(sdm::element_size(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    sdm::store_scalar(bytes.data(), dtype, static_cast<int64_t>(i), values[i]);
  }
  return bytes;
}

inline Bytes pack_ids(const std::vector<int64_t>& ids, bool is_int64) {
  Bytes bytes(ids.size() * (is_int64 ? 8 : 4));
  for (size_t i = 0; i < ids.size(); ++i) {
    const int32_t narrow = static_cast<int32_t>(ids[i]);
    std::memcpy(
        bytes.data() + i * (is_int64 ? 8 : 4),
        is_int64 ? static_cast<const void*>(&ids[i]) : &narrow,
        is_int64 ? 8 : 4
    );
  }
  return bytes;
}

// All tensors are contiguous [B, T, H, last] here, but beta and g are stored as [B, H, T, last].
struct Inputs {
  SdmDims dims;
  Bytes write_idx, read_idx, write_val, read_val, beta, g;
  sdm::SdmTokens host, device;
  std::vector<DeviceArray<uint8_t>*> owned;

  ~Inputs() {
    for (DeviceArray<uint8_t>* array : owned) {
      delete array;
    }
  }

  const void* upload(const Bytes& bytes) {
    owned.push_back(new DeviceArray<uint8_t>(bytes));
    return owned.back()->data;
  }
};

inline std::vector<int64_t> random_ids(const Case& c, int64_t lanes, std::mt19937_64* random) {
  std::uniform_real_distribution<double> uniform;
  std::uniform_int_distribution<int64_t> slot(0, c.S - 1);
  std::vector<int64_t> ids(static_cast<size_t>(c.B * c.T * c.H * lanes));
  for (size_t i = 0; i < ids.size(); ++i) {
    const double kind = uniform(*random);
    ids[i] = slot(*random);
    if (kind < c.unused) {
      const int64_t outside[] = {-1, c.S, -7, INT32_MAX};
      ids[i] = outside[i % 4];
    } else if (kind < c.unused + c.hot) {
      ids[i] = c.S / 2;
    } else if (kind < c.unused + c.hot + c.repeat && i % static_cast<size_t>(lanes) != 0) {
      ids[i] = ids[i - 1];
    }
  }
  return ids;
}

inline std::vector<double> random_floats(
    size_t count, double low, double high, std::mt19937_64* random
) {
  std::uniform_real_distribution<double> uniform(low, high);
  std::vector<double> values(count);
  for (double& x : values) {
    x = uniform(*random);
  }
  return values;
}

inline void make_inputs(const Case& c, Inputs* in) {
  std::mt19937_64 random(1234);
  const int64_t N = c.lengths.empty() ? c.B : static_cast<int64_t>(c.lengths.size());
  in->dims = SdmDims{c.B, c.T, c.H, c.W, c.R, 64, c.S, N, c.C, c.per_write};
  const size_t tokens = static_cast<size_t>(c.B * c.T * c.H);
  const double k = 2.0 / std::sqrt(static_cast<double>(c.W));
  in->write_idx = pack_ids(random_ids(c, c.W, &random), c.write_int64);
  in->read_idx = pack_ids(random_ids(c, c.R, &random), c.read_int64);
  const size_t gates = tokens * static_cast<size_t>(c.per_write ? c.W : 1);
  in->write_val =
      pack_floats(random_floats(tokens * static_cast<size_t>(c.W), -k, k, &random), c.dtype);
  in->read_val =
      pack_floats(random_floats(tokens * static_cast<size_t>(c.R), -k, k, &random), DType::kF32);
  in->beta = pack_floats(random_floats(tokens, 0, 1, &random), c.dtype);
  in->g =
      pack_floats(random_floats(gates, -c.gate, c.gate > 10 ? 0.0 : c.gate / 8, &random), c.dtype);

  const int64_t T = c.T, H = c.H, G = c.per_write ? c.W : 1;
  sdm::SdmTokens& h = in->host;
  h.write_idx = {in->write_idx.data(), c.write_int64, {T * H * c.W, H * c.W, c.W, 1}};
  h.read_idx = {in->read_idx.data(), c.read_int64, {T * H * c.R, H * c.R, c.R, 1}};
  h.write_val = {in->write_val.data(), c.dtype, {T * H * c.W, H * c.W, c.W, 1}};
  h.read_val = {in->read_val.data(), DType::kF32, {T * H * c.R, H * c.R, c.R, 1}};
  h.v = {nullptr, DType::kF32, {0, 0, 0, 0}};
  h.beta = {in->beta.data(), c.dtype, {T * H, 1, T, 0}};
  h.g = {in->g.data(), c.dtype, {T * H * G, G, T * G, 1}};
  in->device = h;
  in->device.write_idx.data = in->upload(in->write_idx);
  in->device.read_idx.data = in->upload(in->read_idx);
  in->device.write_val.data = in->upload(in->write_val);
  in->device.read_val.data = in->upload(in->read_val);
  in->device.beta.data = in->upload(in->beta);
  in->device.g.data = in->upload(in->g);
}

template <typename View>
int64_t offset(const View& view, const ChunkPlace& place, int64_t i, int64_t a) {
  return place.batch * view.stride[0] + (place.token + i) * view.stride[1] +
         place.head * view.stride[2] + a * view.stride[3];
}

inline double value_at(const FloatView& view, const ChunkPlace& place, int64_t i, int64_t a) {
  return sdm::load_scalar(view.data, view.dtype, offset(view, place, i, a));
}

inline int64_t id_at(const IndexView& view, const ChunkPlace& place, int64_t i, int64_t a) {
  const int64_t at = offset(view, place, i, a);
  return view.is_int64 ? static_cast<const int64_t*>(view.data)[at]
                       : static_cast<const int32_t*>(view.data)[at];
}

}  // namespace sdm::test
