#include "layer.h"

#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include "share.h"

namespace outrider {
namespace {

// A little work on each row. The caller is done with few rows before the other threads would be awake.
template <class Row>
void each_row(Context& context, int64_t rows, const Row& row) {
  constexpr int64_t few = 16;
  if (rows <= few) {
    for (int64_t r = 0; r < rows; r++) row(r);
    return;
  }
  const auto work = [&](int thread) {
    const Range mine = share(rows, thread, context.pool.threads());
    for (int64_t r = mine.from; r < mine.to; r++) row(r);
  };
  context.pool.run(std::ref(work));
}

}  // namespace

void run_linear(Context& context, const Weight& weight, const float* bias, const float* x, int64_t rows, float* y, int64_t* best) {
  std::lock_guard<std::mutex> lock(context.busy);
  const bool integer = !is_dense(weight.format());
  Cutter sizes(nullptr);
  if (integer) {
    cut_acts(sizes, rows, weight.k());
    context.scratch.grow(sizes.used());
  }
  Cutter memory(context.scratch.data());
  const Acts a = with(integer ? cut_acts(memory, rows, weight.k()) : plain(rows), x, weight.k());
  struct Found {
    int64_t at = INT64_MAX;  // behind every other; -1: a value was not finite
    float value = -std::numeric_limits<float>::infinity();  // of a thread without outputs

    // The greater of the two, of equals the first.
    void take(const Found& other) {
      const bool greater = other.value > value || (other.value == value && other.at < at);
      if (at >= 0 && (other.at < 0 || greater)) *this = other;
    }
  };
  const int threads = context.pool.threads();
  std::vector<Found> found(static_cast<size_t>(best ? rows * threads : 0));  // while a thread's outputs are in its cache
  const auto work = [&](int thread) {
    if (integer) {
      const Range groups = share(a.k / kGroup, thread, threads);
      quantize_rows(*context.kernels, a, {groups.from * kGroup, groups.to * kGroup});
      context.pool.barrier();
    }
    context.pool.each(thread, weight.blocks(), [&](Range blocks) {
      context.kernels->linear(weight.view(), a, blocks.from, blocks.to, y, weight.n(), bias, false);
      const int64_t from = blocks.from * kLanes, to = std::min(blocks.to * kLanes, weight.n());
      for (int64_t r = 0; best && r < rows; r++) {
        Found next;
        next.at = context.kernels->greatest(y + r * weight.n() + from, to - from, &next.value);
        if (next.at >= 0) next.at += from;
        found[static_cast<size_t>(thread * rows + r)].take(next);
      }
    });
  };
  context.pool.run(std::ref(work));
  for (int64_t r = 0; best && r < rows; r++) {
    Found top;
    for (int t = 0; t < threads; t++) top.take(found[static_cast<size_t>(t * rows + r)]);
    best[r] = top.at;
  }
}

void run_norm(Context& context, const float* x, const float* weight, float eps, int64_t rows, int64_t k, float* y) {
  each_row(context, rows, [&](int64_t r) { context.kernels->norm(x + r * k, weight, eps, k, y + r * k); });
}

void run_embed(Context& context, const Weight& table, const int64_t* ids, int64_t rows, float* y) {
  each_row(context, rows, [&](int64_t r) { table.row(ids[r], y + r * table.k()); });
}

void run_rope_table(Context& context, const float* inv_freq, int64_t half, double scale, const int64_t* positions, int64_t rows, float* cos, float* sin) {
  each_row(context, rows, [&](int64_t r) {
    for (int64_t i = 0; i < half; i++) {
      const double angle = static_cast<double>(static_cast<float>(positions[r]) * inv_freq[i]);
      cos[r * half + i] = static_cast<float>(std::cos(angle) * scale);
      sin[r * half + i] = static_cast<float>(std::sin(angle) * scale);
    }
  });
}

void run_pass(Context& context, const Ends& ends, const std::vector<const std::vector<LayerOn>*>& stacks, Plan& plan, const int64_t* ids,
              const int64_t* wanted, int64_t n, float* hidden, float* logits, int64_t* best) {
  const int64_t rows = plan.rows(), width = ends.head->k(), half = static_cast<int64_t>(ends.inv_freq.size());
  const std::unique_ptr<float[]> own(new float[static_cast<size_t>((rows + n) * width + 2 * rows * half)]);
  float *const embedded = own.get(), *const normed = embedded + rows * width, *const cos = normed + n * width, *const sin = cos + rows * half;
  run_embed(context, *ends.embedding, ids, rows, embedded);
  run_rope_table(context, ends.inv_freq.data(), half, ends.rope_scale, plan.positions(), rows, cos, sin);
  const float* x = embedded;
  for (const auto* stack : stacks) {
    run_layers(context, *stack, plan, cos, sin, x, hidden);
    x = hidden;
    hidden += rows * width;
  }
  if (!n) return;
  each_row(context, n, [&](int64_t r) { context.kernels->norm(x + wanted[r] * width, ends.norm.data(), ends.eps, width, normed + r * width); });
  run_linear(context, *ends.head, nullptr, normed, n, logits, best);
}

}  // namespace outrider
