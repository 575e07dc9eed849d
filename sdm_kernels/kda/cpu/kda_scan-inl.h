// SPDX-License-Identifier: Apache-2.0
//! @file One block of the recurrence on one panel of value columns, forward: what reads and what
//! writes the state.
//!
//! With S the state at the block's start, F the decayed scores of keys, M those of queries:
//!
//!     e = v - kd S                  kd, qd: keys and queries decayed from the block's start
//!     r = e - F u,  u = beta r      by substitution, row by row
//!     o = qd S + M u
//!     S = gamma S + kr^T u          kr: keys decayed to the block's end
//!
//! r is what the state does not yet predict, u what is written. No inverse is formed: substitution
//! costs 120 multiply-adds a column and stays exact when keys repeat.
//!
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {
namespace kda {

// What a block hands to the panels. Matrices with "_t" have the key channel first.
template <typename Acc>
struct BlockKeys {
  Acc* first_t;  // [Kp, 2 kBlock]: kd, then qd (forward) or kr (backward)
  Acc* kr;       // [kBlock, Kp]
  Acc* gamma;    // [Kp]
  Acc* neg_kk;   // [kBlock, kBlock], -F
  Acc* qk;       // [kBlock, kBlock], M
  Acc* beta;     // [kBlock]
};

template <typename Acc>
SDM_INLINE int64_t keys_elements(int64_t Kp) {
  return (3 * Kp + 2 * kBlock + 1) * kBlock + Kp;
}

// In keys_elements() elements of memory.
template <typename Acc>
SDM_INLINE BlockKeys<Acc> keys_at(Acc* memory, int64_t Kp) {
  BlockKeys<Acc> b;
  b.first_t = memory;
  b.kr = b.first_t + 2 * kBlock * Kp;
  b.gamma = b.kr + kBlock * Kp;
  b.neg_kk = b.gamma + Kp;
  b.qk = b.neg_kk + kBlock * kBlock;
  b.beta = b.qk + kBlock * kBlock;
  return b;
}

// r[kBlock, kPanel] comes as v - kd S and leaves as the residual; u becomes beta r.
template <typename Acc>
SDM_INLINE void solve_block(const Acc* neg_kk, const Acc* beta, Acc* r, Acc* u) {
  for (int64_t c = 0; c < kPanel<Acc>; c += kLanes<Acc>) {
    Vec<Acc> x[kBlock];
    SDM_UNROLL_TILE
    for (int i = 0; i < kBlock; ++i) {
      x[i] = load(r + i * kPanel<Acc> + c);
    }
    SDM_UNROLL_TILE
    for (int j = 0; j < kBlock; ++j) {
      const Vec<Acc> write = mul(set1(beta[j]), x[j]);
      store(r + j * kPanel<Acc> + c, x[j]);
      store(u + j * kPanel<Acc> + c, write);
      SDM_UNROLL_TILE
      for (int i = 0; i < kBlock; ++i) {
        if (i > j) {
          x[i] = fma(set1(neg_kk[i * kBlock + j]), write, x[i]);
        }
      }
    }
  }
}

// o[i] += sum over j <= i of qk[i, j] u[j].
template <typename Acc>
SDM_INLINE void add_readings(const Acc* qk, const Acc* u, Acc* o) {
  for (int64_t c = 0; c < kPanel<Acc>; c += kLanes<Acc>) {
    Vec<Acc> x[kBlock];
    SDM_UNROLL_TILE
    for (int j = 0; j < kBlock; ++j) {
      x[j] = load(u + j * kPanel<Acc> + c);
    }
    SDM_UNROLL_TILE
    for (int i = 0; i < kBlock; ++i) {
      Vec<Acc> y = load(o + i * kPanel<Acc> + c);
      SDM_UNROLL_TILE
      for (int j = 0; j < kBlock; ++j) {
        if (j <= i) {
          y = fma(set1(qk[i * kBlock + j]), x[j], y);
        }
      }
      store(o + i * kPanel<Acc> + c, y);
    }
  }
}

// state_out = gamma state + kr^T u; they may be the same panel.
template <typename Acc>
SDM_INLINE void update_state(
    const BlockKeys<Acc>& keys, int64_t Kp, const Acc* u, const Acc* state, Acc* state_out
) {
  product<Start::kScaled, kPanel<Acc>>(
      Kp, kBlock, keys.kr, int64_t{1}, Kp, u, state_out, static_cast<const Acc*>(keys.gamma), state
  );
}

// out[i] = x[i] . y[i] for rows of a panel, four at a time.
template <typename Acc>
SDM_INLINE void panel_dots(const Acc* x, const Acc* y, int64_t rows, Acc* out) {
  constexpr int64_t lanes = kLanes<Acc>;
  constexpr int64_t ld = kPanel<Acc>;
  for (int64_t i = 0; i < rows; i += 4) {
    Vec<Acc> dots[4];
    SDM_UNROLL_TILE
    for (int64_t j = 0; j < 4; ++j) {
      const Acc* a = x + (i + j) * ld;
      const Acc* b = y + (i + j) * ld;
      dots[j] = fma(load(a + lanes), load(b + lanes), mul(load(a), load(b)));
    }
    sum4(dots, out + i);
  }
}

// x[i] = v[i] - x[i].
template <typename Acc>
SDM_INLINE void subtract_from(const Acc* v, Acc* x) {
  for (int64_t c = 0; c < kBlock * kPanel<Acc>; c += kLanes<Acc>) {
    store(x + c, sub(load(v + c), load(x + c)));
  }
}

}  // namespace kda
}  // namespace SDM_ISA
}  // namespace sdm
