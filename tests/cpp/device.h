// SPDX-License-Identifier: Apache-2.0
//! @file What the programs that test CUDA kernels share: checked calls, device memory, a stopwatch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime.h>

namespace sdm::test {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::printf("%s: %s\n", what, cudaGetErrorString(error));
    std::exit(2);
  }
}

template <typename T>
std::vector<T> to_host(const T* device, size_t count) {
  std::vector<T> host(count);
  check(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost), "copy out");
  return host;
}

// Filled with a pattern that is no sensible number of any type.
template <typename T>
struct DeviceArray {
  T* data = nullptr;
  size_t size = 0;

  explicit DeviceArray(size_t count) : size(count) {
    const size_t bytes = std::max<size_t>(count, 1) * sizeof(T);
    check(cudaMalloc(reinterpret_cast<void**>(&data), bytes), "cudaMalloc");
    check(cudaMemset(data, 0xa5, bytes), "cudaMemset");
  }

  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    check(cudaMemcpy(data, host.data(), size * sizeof(T), cudaMemcpyHostToDevice), "copy in");
  }

  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  ~DeviceArray() { cudaFree(data); }

  std::vector<T> host() const { return to_host(data, size); }
};

// Bytes on the device between guards that must not change; NaN until something is written.
class DeviceBytes {
 public:
  explicit DeviceBytes(int64_t size) : size_(static_cast<size_t>(size)) {
    check(cudaMalloc(reinterpret_cast<void**>(&block_), size_ + 2 * kGuard), "cudaMalloc");
    check(cudaMemset(block_, 0xff, size_ + 2 * kGuard), "cudaMemset");
  }

  explicit DeviceBytes(const std::vector<uint8_t>& host)
      : DeviceBytes(static_cast<int64_t>(host.size())) {
    check(cudaMemcpy(data(), host.data(), size_, cudaMemcpyHostToDevice), "copy in");
  }

  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  ~DeviceBytes() { cudaFree(block_); }

  void* data() const { return block_ + kGuard; }

  // All bytes; fails the program if a guard has changed.
  std::vector<uint8_t> fetch(const char* name) const {
    std::vector<uint8_t> all(size_ + 2 * kGuard);
    check(cudaMemcpy(all.data(), block_, all.size(), cudaMemcpyDeviceToHost), "copy out");
    for (size_t i = 0; i < kGuard; ++i) {
      if (all[i] != 0xff || all[all.size() - 1 - i] != 0xff) {
        std::printf("FAIL %s: written outside\n", name);
        std::exit(1);
      }
    }
    return {all.begin() + kGuard, all.end() - kGuard};
  }

 private:
  static constexpr size_t kGuard = 256;
  uint8_t* block_ = nullptr;
  size_t size_;
};

// Milliseconds on the device of what a call launches.
class Stopwatch {
 public:
  Stopwatch() {
    check(cudaEventCreate(&begin_), "event");
    check(cudaEventCreate(&end_), "event");
  }

  ~Stopwatch() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  template <typename F>
  float operator()(F&& f) {
    check(cudaEventRecord(begin_), "event");
    check(f(), "launch");
    check(cudaEventRecord(end_), "event");
    check(cudaEventSynchronize(end_), "event");
    float time;
    check(cudaEventElapsedTime(&time, begin_, end_), "event");
    return time;
  }

 private:
  cudaEvent_t begin_, end_;
};

inline float median(std::vector<float> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace sdm::test
