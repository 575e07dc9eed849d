// SPDX-License-Identifier: Apache-2.0
//! @file The exact token recurrence, for decoding from a pool of states.
//!
//! Bytes: a state is read and written once a call, 128 KiB at K = V = 128 in float, against 48
//! KFLOP a token: memory is what costs. So a panel of the state is worked on in the first-level
//! cache, for up to a block of tokens, two passes over it a token. Parallel over sequences and
//! heads, and over panels where those are few.
//!
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {
namespace kda {

// Working memory of a thread.
template <typename Acc>
struct StepScratch {
  BlockTokens<Acc> tokens;
  Acc* v;      // [kBlock, kPanel]
  Acc* state;  // [panels, Kp, kPanel]
};

template <typename Acc>
StepScratch<Acc> carve_step_scratch(cpu::Carver* carver, const KdaDims& dims, int64_t panels) {
  const int64_t Kp = round_up(dims.K, kTile);
  StepScratch<Acc> s;
  s.tokens = carve_tokens<Acc>(carver, Kp);
  s.v = carver->take<Acc>(kBlock * kPanel<Acc>);
  s.state = carver->take<Acc>(panels * Kp * kPanel<Acc>);
  return s;
}

// Chains of a sum over channels, added in order at its end.
constexpr int kChains = 4;

// One token on one panel: v becomes the output.
template <typename Acc>
SDM_INLINE void step_token(
    int64_t Kp,
    const Acc* q,
    const Acc* k,
    const Acc* decay,
    Acc beta,
    Acc scale,
    Acc* state,
    Acc* v
) {
  constexpr int64_t lanes = kLanes<Acc>;
  constexpr int64_t ld = kPanel<Acc>;
  const Vec<Acc> zero = set1(Acc(0));
  Vec<Acc> a[kChains], b[kChains];
  SDM_UNROLL_TILE
  for (int j = 0; j < kChains; ++j) {
    a[j] = b[j] = zero;
  }
  for (int64_t c = 0; c < Kp; c += kChains) {
    SDM_UNROLL_TILE
    for (int j = 0; j < kChains; ++j) {
      const Acc* row = state + (c + j) * ld;
      const Vec<Acc> factor = set1(decay[c + j]);
      const Vec<Acc> key = set1(k[c + j]);
      a[j] = fma(key, mul(factor, load(row)), a[j]);
      b[j] = fma(key, mul(factor, load(row + lanes)), b[j]);
    }
  }
  const Vec<Acc> strength = set1(beta);
  const Vec<Acc> write_a = mul(strength, sub(load(v), add(add(a[0], a[1]), add(a[2], a[3]))));
  const Vec<Acc> write_b =
      mul(strength, sub(load(v + lanes), add(add(b[0], b[1]), add(b[2], b[3]))));
  SDM_UNROLL_TILE
  for (int j = 0; j < kChains; ++j) {
    a[j] = b[j] = zero;
  }
  for (int64_t c = 0; c < Kp; c += kChains) {
    SDM_UNROLL_TILE
    for (int j = 0; j < kChains; ++j) {
      Acc* row = state + (c + j) * ld;
      const Vec<Acc> factor = set1(decay[c + j]);
      const Vec<Acc> key = set1(k[c + j]);
      const Vec<Acc> query = set1(q[c + j]);
      const Vec<Acc> x = fma(key, write_a, mul(factor, load(row)));
      const Vec<Acc> y = fma(key, write_b, mul(factor, load(row + lanes)));
      store(row, x);
      store(row + lanes, y);
      a[j] = fma(query, x, a[j]);
      b[j] = fma(query, y, b[j]);
    }
  }
  const Vec<Acc> q_scale = set1(scale);
  store(v, mul(q_scale, add(add(a[0], a[1]), add(a[2], a[3]))));
  store(v + lanes, mul(q_scale, add(add(b[0], b[1]), add(b[2], b[3]))));
}

// Panels [begin, end) of one sequence and head.
template <typename Acc>
void step_panels(
    const KdaStepParams& p,
    const KdaSequence& sequence,
    int64_t head,
    int64_t begin,
    int64_t end,
    const StepScratch<Acc>& s
) {
  const KdaDims& dims = p.dims;
  const int64_t Kp = round_up(dims.K, kTile);
  const bool skip = sequence.state < 0;
  if (skip) {
    zero_rows(s.v, kBlock * kPanel<Acc>);
  }
  for (int64_t panel = begin; panel < end && !skip; ++panel) {
    Acc* state = s.state + (panel - begin) * Kp * kPanel<Acc>;
    load_state_panel(p.initial, sequence.state, head, panel, dims.K, dims.V, state);
  }
  for (int64_t done = 0; done < sequence.length; done += kBlock) {
    const int64_t rest = sequence.length - done;
    const BlockPlace place{
        sequence.batch, sequence.begin + done, rest < kBlock ? rest : kBlock, 0, false
    };
    if (!skip) {
      load_tokens(dims, p.options, p.tokens, place, head, place.num_tokens, s.tokens);
    }
    for (int64_t panel = begin; panel < end; ++panel) {
      Acc* state = s.state + (panel - begin) * Kp * kPanel<Acc>;
      if (!skip) {
        load_panel_rows(
            p.tokens.v, place.batch, place.token, head, place.num_tokens, panel, dims.V, s.v
        );
      }
      for (int64_t i = 0; i < place.num_tokens; ++i) {
        Acc* row = s.v + i * kPanel<Acc>;
        if (!skip) {
          step_token(
              Kp,
              s.tokens.q + i * Kp,
              s.tokens.k + i * Kp,
              s.tokens.decay + i * Kp,
              s.tokens.beta[i],
              static_cast<Acc>(p.options.scale),
              state,
              row
          );
        }
        const int64_t token = (place.batch * dims.T + place.token + i) * dims.HV + head;
        store_row(
            row,
            p.tokens.q.dtype,
            token * dims.V + panel * kPanel<Acc>,
            panel_width<Acc>(panel, dims.V),
            p.out
        );
      }
    }
  }
  for (int64_t panel = begin; panel < end && !skip; ++panel) {
    const Acc* state = s.state + (panel - begin) * Kp * kPanel<Acc>;
    store_state_panel(state, p.final_state, sequence.state, head, panel, dims.K, dims.V);
  }
}

}  // namespace kda
}  // namespace SDM_ISA
}  // namespace sdm
