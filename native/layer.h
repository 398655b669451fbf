// Whole operations on the rows of a pass: what the bindings call, after they have checked everything.
#pragma once

#include <memory>
#include <vector>

#include "common.h"
#include "plan.h"
#include "pool.h"
#include "weight.h"

namespace outrider {

// Threads, kernels and working memory. One call at a time.
struct Context {
  Context(int threads, const Kernels* kernels) : pool(threads), kernels(kernels) {}

  Pool pool;
  const Kernels* kernels;
  std::mutex busy;  // guards `scratch`
  Buffer scratch;
};

// A linear layer; the bias is padded to whole blocks, or empty.
struct Linear {
  std::shared_ptr<const Weight> weight;
  std::vector<float> bias;
};

struct Layer {
  Linear q, k, v, o, gate, up, down;
  std::vector<float> input_norm, post_norm, q_norm, k_norm;  // the last two may be empty
  int64_t heads, kv_heads, head_dim, window;                 // window 0: none
  float eps;
  int64_t hidden() const { return o.weight->n(); }
};

// x [rows, in] -> y [rows, out]; best [rows], if wanted: where each row's greatest output is, -1 if one is not finite.
void run_linear(Context& context, const Weight& weight, const float* bias, const float* x, int64_t rows, float* y, int64_t* best = nullptr);
void run_norm(Context& context, const float* x, const float* weight, float eps, int64_t rows, int64_t k, float* y);
void run_embed(Context& context, const Weight& table, const int64_t* ids, int64_t rows, float* y);
// Angles in fp32, as the reference takes them; cosine and sine of each in double, so that they are the same everywhere.
void run_rope_table(Context& context, const float* inv_freq, int64_t half, double scale, const int64_t* positions, int64_t rows, float* cos, float* sin);
// Decoder layers one after the other, x [rows, hidden] -> y, in one region of the threads; cos and sin are
// [rows, head_dim / 2]. x and y must differ; all layers have one hidden width.
struct LayerOn {
  const Layer* layer;
  const KVView* kv;
};
void run_layers(Context& context, const std::vector<LayerOn>& layers, Plan& plan, const float* cos, const float* sin, const float* x, float* y);

// What stands before and behind a model's layers.
struct Ends {
  std::shared_ptr<const Weight> embedding, head;
  std::vector<float> norm, inv_freq;
  double rope_scale;
  float eps;
};
// A whole pass: tokens `ids`, one a row of the plan, through `stacks` in order. hidden is [stacks, rows, hidden], the states
// after each of them; logits [n, vocabulary] are those of the rows `wanted`, best [n] the tokens of their greatest ones.
void run_pass(Context& context, const Ends& ends, const std::vector<const std::vector<LayerOn>*>& stacks, Plan& plan, const int64_t* ids,
              const int64_t* wanted, int64_t n, float* hidden, float* logits, int64_t* best);

}  // namespace outrider
