// SPDX-License-Identifier: Apache-2.0
//! @file Whole calls: memory, units, and what is summed over sequences.
//!
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {
namespace kda {

using ::sdm::kda::plan_units;
using ::sdm::kda::Unit;
using ::sdm::kda::UnitPlan;

// Buffers of every worker in one block of memory: `carve` is called with a Carver for each.
template <typename T, typename Carve>
void carve_all(cpu::Carver* carver, std::vector<T>* all, int64_t count, Carve&& carve) {
  all->clear();
  for (int64_t i = 0; i < count; ++i) {
    all->push_back(carve(carver));
  }
}

// Value heads at once of a unit that all threads share: their panels keep the threads busy in a
// scan. A unit of one thread takes them one by one, which needs the least memory.
inline int64_t heads_at_once(
    const KdaDims& dims, const UnitPlan& plan, int64_t panels, int64_t threads
) {
  const int64_t heads = dims.HV / dims.H;
  const int64_t wanted = plan.shared > 0 ? ceil_div(2 * threads, panels) : 1;
  return heads < wanted ? heads : wanted;
}

// Blocks at once of such a unit: some items for every thread, and enough work to be worth the
// parallel regions.
inline int64_t shared_blocks(int64_t heads, int64_t threads) {
  const int64_t items = threads > 2 ? 4 * threads : 8;
  const int64_t blocks = ceil_div(items, heads);
  return blocks > 4 ? blocks : 4;
}

template <typename Acc>
FwdShape forward_shape(const KdaDims& dims, const UnitPlan& plan, int64_t threads) {
  const int64_t heads = heads_at_once(dims, plan, num_panels<Acc>(dims.V), threads);
  return {heads, plan.shared > 0 ? shared_blocks(heads, threads) : 1};
}

template <typename Acc>
Status forward_calls(
    const KdaFwdParams& p,
    const std::vector<KdaSequence>& sequences,
    const cpu::ParallelFor& parallel
) {
  const KdaDims& dims = p.dims;
  const int64_t num_sequences = static_cast<int64_t>(sequences.size());
  const int64_t threads = parallel.num_threads;
  const UnitPlan plan = plan_units(sequences.data(), num_sequences, dims.H, threads);
  const FwdShape shape = forward_shape<Acc>(dims, plan, threads);
  const int64_t others = static_cast<int64_t>(plan.units.size()) - plan.shared;
  const int64_t num_units = cpu::num_workers(parallel, others);

  std::vector<FwdUnit<Acc>> units;
  std::vector<FwdScratch<Acc>> scratch;
  const auto carve = [&](cpu::Carver* carver) {
    carve_all(carver, &units, num_units, [&](cpu::Carver* c) {
      return carve_fwd_unit<Acc>(c, dims, shape);
    });
    carve_all(carver, &scratch, threads, [&](cpu::Carver* c) {
      return carve_fwd_scratch<Acc>(c, dims);
    });
  };
  cpu::Carver count(nullptr);
  carve(&count);
  const cpu::Block block(count.used());
  if (block.data() == nullptr) {
    return Status::kOutOfMemory;
  }
  cpu::Carver carver(block.data());
  carve(&carver);

  KdaStateView chunk_states{};
  if (p.chunk_states.data != nullptr) {
    chunk_states = state_view(p.chunk_states, dims);
  }
  const FwdCall<Acc> call{
      dims, p.options, p.tokens, p.initial, p.final_state, chunk_states, p.out, nullptr, 1
  };
  ::sdm::kda::for_each_unit(
      plan,
      parallel,
      [&](const Unit& unit, const cpu::ParallelFor& threads_of_unit, int64_t worker) {
        forward_unit(
            call,
            unit.sequence,
            unit.key_head,
            shape,
            threads_of_unit,
            units[static_cast<size_t>(worker)],
            scratch.data() + worker
        );
      }
  );
  return Status::kOk;
}

inline Status forward(
    const KdaFwdParams& p,
    const std::vector<KdaSequence>& sequences,
    const cpu::ParallelFor& parallel
) {
  return p.tokens.q.dtype == DType::kF64 ? forward_calls<double>(p, sequences, parallel)
                                         : forward_calls<float>(p, sequences, parallel);
}

// ---------------------------------------------------------------------------------------------

template <typename Acc>
BwdShape backward_shape(const KdaBwdParams& p, const UnitPlan& plan, int64_t threads) {
  constexpr int64_t kSegmentTokens = 64;  // states of four blocks stay in a second-level cache
  const KdaDims& dims = p.dims;
  const int64_t per_chunk = ceil_div(dims.C, kBlock);
  BwdShape shape;
  shape.forward = forward_shape<Acc>(dims, plan, threads);
  shape.heads = shape.forward.heads;
  shape.group_chunks = 1;
  shape.checkpoints = 0;
  if (p.chunk_states.data == nullptr) {
    shape.group_chunks = dims.C < kSegmentTokens ? kSegmentTokens / dims.C : 1;
    shape.checkpoints = ceil_div(ceil_div(plan.longest, dims.C), shape.group_chunks);
  }
  const bool shared = plan.shared > 0;
  const int64_t wanted = shared ? shared_blocks(shape.heads, threads) : kSegmentTokens / kBlock;
  const int64_t group_blocks = shape.group_chunks * per_chunk;
  shape.segment_blocks = round_up(wanted, group_blocks);
  shape.window = shared ? shape.segment_blocks : 1;
  return shape;
}

// Sums over sequences for the gradients of A_log and dt_bias: in the order of the sequences, each
// from its last block to its first.
template <typename Acc>
struct HeadSums {
  std::vector<double> of_sequences;  // [sequences of a round, HV, 2, Kp]
  std::vector<double> totals;        // [HV, 2, Kp]

  void add(int64_t count) {
    const size_t size = totals.size();
    for (size_t n = 0; n < static_cast<size_t>(count); ++n) {
      for (size_t i = 0; i < size; ++i) {
        totals[i] += of_sequences[n * size + i];
      }
    }
  }

  void store(const KdaBwdParams& p) const {
    const KdaDims& dims = p.dims;
    const int64_t Kp = round_up(dims.K, kTile);
    Acc* d_A_log = reinterpret_cast<Acc*>(p.d_A_log);
    Acc* d_dt_bias = reinterpret_cast<Acc*>(p.d_dt_bias);
    for (int64_t head = 0; head < dims.HV; ++head) {
      const double* d_bias = totals.data() + head * 2 * Kp;
      const double* d_A = d_bias + Kp;
      double sum = 0.0;
      for (int64_t c = 0; c < dims.K; ++c) {
        if (d_dt_bias != nullptr) {
          d_dt_bias[head * dims.K + c] = static_cast<Acc>(d_bias[c]);
        }
        sum += d_A[c];
      }
      if (d_A_log != nullptr) {
        d_A_log[head] = static_cast<Acc>(sum);
      }
    }
  }
};

template <typename Acc>
Status backward_calls(
    const KdaBwdParams& p,
    const std::vector<KdaSequence>& sequences,
    const cpu::ParallelFor& parallel
) {
  const KdaDims& dims = p.dims;
  const int64_t num_sequences = static_cast<int64_t>(sequences.size());
  const int64_t threads = parallel.num_threads;
  const int64_t Kp = round_up(dims.K, kTile);
  const int64_t heads = dims.HV / dims.H;

  // Sequences come in rounds, so that their sums need not all be held.
  const bool sums = p.d_A_log != nullptr || p.d_dt_bias != nullptr;
  constexpr int64_t kRoundBytes = int64_t{32} << 20;
  const int64_t sums_size = dims.HV * 2 * Kp;
  int64_t round = num_sequences;
  if (sums && round * sums_size > kRoundBytes / 8) {
    round = kRoundBytes / 8 / sums_size > 4 * threads ? kRoundBytes / 8 / sums_size : 4 * threads;
  }
  HeadSums<Acc> head_sums;
  if (sums) {
    head_sums.of_sequences.resize(static_cast<size_t>(round * sums_size));
    head_sums.totals.assign(static_cast<size_t>(sums_size), 0.0);
  }

  std::vector<UnitPlan> plans;
  for (int64_t n = 0; n < num_sequences; n += round) {
    const int64_t count = num_sequences - n < round ? num_sequences - n : round;
    plans.push_back(plan_units(sequences.data() + n, count, dims.H, threads));
  }
  std::vector<BwdUnit<Acc>> units;
  std::vector<BwdScratch<Acc>> scratch;
  std::vector<FwdScratch<Acc>> forward_scratch;
  int64_t first = 0;
  for (const UnitPlan& plan : plans) {
    const BwdShape shape = backward_shape<Acc>(p, plan, threads);
    const int64_t others = static_cast<int64_t>(plan.units.size()) - plan.shared;
    const int64_t num_units = cpu::num_workers(parallel, others);
    const auto carve = [&](cpu::Carver* carver) {
      carve_all(carver, &units, num_units, [&](cpu::Carver* c) {
        return carve_bwd_unit<Acc>(c, dims, shape);
      });
      carve_all(carver, &scratch, threads, [&](cpu::Carver* c) {
        return carve_bwd_scratch<Acc>(c, dims);
      });
      carve_all(carver, &forward_scratch, shape.checkpoints > 0 ? threads : 0, [&](cpu::Carver* c) {
        return carve_fwd_scratch<Acc>(c, dims);
      });
    };
    cpu::Carver counter(nullptr);
    carve(&counter);
    const cpu::Block block(counter.used());
    if (block.data() == nullptr) {
      return Status::kOutOfMemory;
    }
    cpu::Carver carver(block.data());
    carve(&carver);

    ::sdm::kda::for_each_unit(
        plan,
        parallel,
        [&](const Unit& unit, const cpu::ParallelFor& threads_of_unit, int64_t worker) {
          const BwdUnit<Acc>& buffers = units[static_cast<size_t>(worker)];
          backward_unit(
              p,
              unit.sequence,
              unit.key_head,
              shape,
              threads_of_unit,
              buffers,
              scratch.data() + worker,
              shape.checkpoints > 0 ? forward_scratch.data() + worker : nullptr
          );
          if (sums) {
            const int64_t row = (unit.sequence.index - first) * dims.HV + unit.key_head * heads;
            std::memcpy(
                head_sums.of_sequences.data() + row * 2 * Kp,
                buffers.totals,
                sizeof(double) * static_cast<size_t>(heads * 2 * Kp)
            );
          }
        }
    );
    const int64_t count = num_sequences - first < round ? num_sequences - first : round;
    if (sums) {
      head_sums.add(count);
    }
    first += count;
  }
  if (sums) {
    head_sums.store(p);
  }
  return Status::kOk;
}

inline Status backward(
    const KdaBwdParams& p,
    const std::vector<KdaSequence>& sequences,
    const cpu::ParallelFor& parallel
) {
  return p.tokens.q.dtype == DType::kF64 ? backward_calls<double>(p, sequences, parallel)
                                         : backward_calls<float>(p, sequences, parallel);
}

// ---------------------------------------------------------------------------------------------

template <typename Acc>
Status step_calls(
    const KdaStepParams& p,
    const std::vector<KdaSequence>& sequences,
    const cpu::ParallelFor& parallel
) {
  const KdaDims& dims = p.dims;
  const int64_t panels = num_panels<Acc>(dims.V);
  const int64_t threads = parallel.num_threads;
  const int64_t whole = static_cast<int64_t>(sequences.size()) * dims.HV;
  const int64_t pieces = whole >= 4 * threads || whole % threads == 0 ? 1 : panels;
  const int64_t piece = ceil_div(panels, pieces);

  std::vector<StepScratch<Acc>> scratch;
  const auto carve = [&](cpu::Carver* carver) {
    carve_all(carver, &scratch, threads, [&](cpu::Carver* c) {
      return carve_step_scratch<Acc>(c, dims, piece);
    });
  };
  cpu::Carver count(nullptr);
  carve(&count);
  const cpu::Block block(count.used());
  if (block.data() == nullptr) {
    return Status::kOutOfMemory;
  }
  cpu::Carver carver(block.data());
  carve(&carver);

  cpu::for_each_item(parallel, whole * pieces, [&](int64_t worker, int64_t item) {
    const int64_t stream = item / pieces;
    const int64_t begin = item % pieces * piece;
    step_panels(
        p,
        sequences[static_cast<size_t>(stream / dims.HV)],
        stream % dims.HV,
        begin,
        panels - begin < piece ? panels : begin + piece,
        scratch[static_cast<size_t>(worker)]
    );
  });
  return Status::kOk;
}

inline Status step(
    const KdaStepParams& p,
    const std::vector<KdaSequence>& sequences,
    const cpu::ParallelFor& parallel
) {
  return p.tokens.q.dtype == DType::kF64 ? step_calls<double>(p, sequences, parallel)
                                         : step_calls<float>(p, sequences, parallel);
}

}  // namespace kda
}  // namespace SDM_ISA
}  // namespace sdm
