#include "layer.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace outrider {
namespace {

struct Range {
  int64_t from, to;
};

// The share of `thread` in `total` pieces of work.
Range share(int64_t total, int thread, int threads) { return {total * thread / threads, total * (thread + 1) / threads}; }

// Activations in fp32 only.
Acts plain(int64_t rows) {
  Acts a{};
  a.rows = rows;
  return a;
}

// Activations of width k in `memory`, for weights in 8 bits or fewer.
Acts cut_acts(Cutter& memory, int64_t rows, int64_t k) {
  const int64_t groups = rows * (k / kGroup);
  Acts a = plain(rows);
  a.q = memory.take<int8_t>(groups * kGroup);
  a.scale = memory.take<float>(groups);
  a.shift = memory.take<float>(groups);
  a.start8 = memory.take<int32_t>(groups);
  a.start128 = memory.take<int32_t>(groups);
  return a;
}

Acts with(Acts a, const float* x, int64_t k) {
  a.x = x;
  a.k = k;
  return a;
}

void quantize_row(const Kernels& kernels, const Acts& a, int64_t row) {
  const Tiles tiles(a.rows, kernels.tile);
  const int64_t size = a.rows / tiles.count, wide = a.rows % tiles.count, in_wide = wide * (size + 1);
  const int64_t t = row < in_wide ? row / (size + 1) : wide + (row - in_wide) / size;
  const int64_t at = tiles.start(t) * (a.k / kGroup) + (row - tiles.start(t));
  kernels.quantize(a.x + row * a.k, a.k, tiles.size(t), at, a);
}

bool any_integer(std::initializer_list<const Linear*> linears) {
  return std::any_of(linears.begin(), linears.end(), [](const Linear* l) { return !is_dense(l->weight->format()); });
}

// Blocks `range` of several weights taken as one.
struct Product {
  const Linear* linear;
  float* y;
};

void multiply(const Kernels& kernels, const Acts& a, std::initializer_list<Product> products, Range range, bool add = false) {
  int64_t before = 0;
  for (const Product& p : products) {
    const Weight& w = *p.linear->weight;
    const int64_t from = std::max<int64_t>(range.from - before, 0), to = std::min(range.to - before, w.blocks());
    if (from < to) kernels.linear(w.view(), a, from, to, p.y, w.n(), p.linear->bias.empty() ? nullptr : p.linear->bias.data(), add);
    before += w.blocks();
  }
}

// Asks for the first bytes of a share of blocks while there is other work: each phase is so short that the start of its
// weights would otherwise cost as much as all the rest.
void warm(std::initializer_list<const Linear*> linears, Range range) {
  constexpr int64_t most = 32 * 1024;
  for (const Linear* linear : linears) {
    const Weight& w = *linear->weight;
    if (range.from < w.blocks() && range.from < range.to) {
      const int64_t bytes = block_bytes(w.format(), w.k());
      const uint8_t* p = w.view().data + range.from * bytes;
      const int64_t size = std::min(most, (std::min(range.to, w.blocks()) - range.from) * bytes);
      for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(p + i, 0, 2);
      return;
    }
    range = {range.from - w.blocks(), range.to - w.blocks()};
  }
}

// One layer's pass: what the threads share. Each method is one phase, done together; barriers lie between them.
struct Pass {
  Context& context;
  const Layer& layer;
  const Plan& plan;
  const Plan::Seen& seen;
  const KVView& kv;
  const float *cos, *sin, *x;
  float* y;
  int threads;
  int64_t rows, padded, ffn;
  int64_t scratch_floats = 0;  // of one thread
  Acts acts{};
  float *normed = nullptr, *q = nullptr, *k = nullptr, *v = nullptr, *turned = nullptr, *mixed = nullptr;
  float *gate = nullptr, *up = nullptr, *scratch = nullptr;

  const Kernels& kernels() const { return *context.kernels; }

  int64_t cut(uint8_t* memory) {
    const int64_t q_width = layer.heads * layer.head_dim, kv_width = layer.kv_heads * layer.head_dim;
    Cutter cutter(memory);
    acts = cut_acts(cutter, rows, std::max({layer.hidden(), q_width, ffn}) / kGroup * kGroup);
    normed = cutter.take<float>(rows * layer.hidden());
    q = cutter.take<float>(rows * q_width);
    k = cutter.take<float>(rows * kv_width);
    v = cutter.take<float>(rows * kv_width);
    turned = cutter.take<float>(rows * layer.heads * padded);
    mixed = cutter.take<float>(rows * q_width);
    gate = cutter.take<float>(rows * ffn);
    up = cutter.take<float>(rows * ffn);
    scratch = cutter.take<float>(scratch_floats * threads);
    return cutter.used();
  }

  void norm(int thread, const float* from, const std::vector<float>& weight, bool quantize) {
    const int64_t width = layer.hidden();
    const Acts a = with(acts, normed, width);
    const Range mine = share(rows, thread, threads);
    for (int64_t r = mine.from; r < mine.to; r++) {
      kernels().norm(from + r * width, weight.data(), layer.eps, width, normed + r * width);
      if (quantize) quantize_row(kernels(), a, r);
    }
  }

  void quantize(int thread, const float* from, int64_t width) {
    const Acts a = with(acts, from, width);
    const Range mine = share(rows, thread, threads);
    for (int64_t r = mine.from; r < mine.to; r++) quantize_row(kernels(), a, r);
  }

  // Rotary embedding of queries and keys, KV writes: one head of one row is one piece of work.
  void rotate_and_store(int thread) {
    const int64_t heads = layer.heads, kv_heads = layer.kv_heads, dim = layer.head_dim, pieces = heads + kv_heads;
    const int64_t element = kv.bf16 ? 2 : 4;
    const float root = 1.0f / std::sqrt(static_cast<float>(dim));
    const float* q_norm = layer.q_norm.empty() ? nullptr : layer.q_norm.data();
    const float* k_norm = layer.k_norm.empty() ? nullptr : layer.k_norm.data();
    const Range mine = share(rows * pieces, thread, threads);
    for (int64_t i = mine.from; i < mine.to; i++) {
      const int64_t row = i / pieces, piece = i % pieces, h = piece - heads;
      const float *c = cos + row * (dim / 2), *s = sin + row * (dim / 2);
      if (h < 0) {
        float* to = turned + (row * heads + piece) * padded;
        kernels().rotate(q + (row * heads + piece) * dim, q_norm, layer.eps, c, s, dim, root, to);
        std::fill(to + dim, to + padded, 0.0f);
        continue;
      }
      float *key = k + (row * kv_heads + h) * dim, *value = v + (row * kv_heads + h) * dim;
      const int64_t at = (plan.slots()[row] * kv_heads + h) * dim * element;
      kernels().rotate(key, k_norm, layer.eps, c, s, dim, 1.0f, key);
      kernels().store_kv(key, dim, kv.bf16, static_cast<uint8_t*>(kv.k) + at);
      kernels().store_kv(value, dim, kv.bf16, static_cast<uint8_t*>(kv.v) + at);
    }
  }

  void attend(int thread) {
    const int64_t shared = layer.heads / layer.kv_heads;
    const auto n_tiles = static_cast<int64_t>(seen.tiles.size());
    // Few rows: query heads apart, so that all threads get work. Who does what changes no bits.
    const int64_t together = n_tiles * layer.kv_heads >= 4 * threads ? shared : 1;
    const int64_t per_tile = layer.heads / together;
    for (int64_t i = context.pool.next(); i < n_tiles * per_tile; i = context.pool.next()) {
      const RowTile& tile = seen.tiles[static_cast<size_t>(i / per_tile)];
      const int64_t head = i % per_tile * together;
      AttendTask task = {&seen.rows[static_cast<size_t>(tile.first)], tile.count, together,
                         turned + (tile.first * layer.heads + head) * padded, layer.heads * padded, padded,
                         mixed + (tile.first * layer.heads + head) * layer.head_dim, layer.heads * layer.head_dim,
                         kv, head / shared, scratch + thread * scratch_floats};
      kernels().attend(task);
    }
  }

  // Gate and up projection of the same outputs, one after the other, then the gate while both are in the cache.
  void gate_up(int thread, const Acts& a) {
    const Range mine = share(layer.gate.weight->blocks(), thread, threads);
    multiply(kernels(), a, {{&layer.gate, gate}}, mine);
    warm({&layer.up}, mine);
    multiply(kernels(), a, {{&layer.up, up}}, mine);
    const int64_t from = mine.from * kLanes, to = std::min(mine.to * kLanes, ffn);
    for (int64_t r = 0; r < rows && from < to; r++) kernels().silu_mul(gate + r * ffn + from, up + r * ffn + from, to - from, gate + r * ffn + from);
  }

  void run(int thread) {
    const int64_t hidden = layer.hidden(), q_width = layer.heads * layer.head_dim;
    const auto blocks = [](const Linear& l) { return l.weight->blocks(); };
    Pool& pool = context.pool;

    const Range in = share(blocks(layer.q) + blocks(layer.k) + blocks(layer.v), thread, threads);
    const Range out = share(blocks(layer.o), thread, threads);
    warm({&layer.q, &layer.k, &layer.v}, in);
    norm(thread, x, layer.input_norm, any_integer({&layer.q, &layer.k, &layer.v}));
    pool.barrier();
    multiply(kernels(), with(acts, normed, hidden), {{&layer.q, q}, {&layer.k, k}, {&layer.v, v}}, in);
    pool.barrier();
    warm({&layer.o}, out);
    rotate_and_store(thread);
    pool.barrier();
    attend(thread);
    pool.barrier();
    if (any_integer({&layer.o})) {
      quantize(thread, mixed, q_width);
      pool.barrier();
    }
    const int64_t from = out.from * kLanes, to = std::min(out.to * kLanes, hidden);
    if (x != y)
      for (int64_t r = 0; r < rows && from < to; r++) std::copy(x + r * hidden + from, x + r * hidden + to, y + r * hidden + from);
    multiply(kernels(), with(acts, mixed, q_width), {{&layer.o, y}}, out, true);
    pool.barrier();
    warm({&layer.gate}, share(blocks(layer.gate), thread, threads));
    norm(thread, y, layer.post_norm, any_integer({&layer.gate, &layer.up}));
    pool.barrier();
    gate_up(thread, with(acts, normed, hidden));
    warm({&layer.down}, share(blocks(layer.down), thread, threads));
    pool.barrier();
    if (any_integer({&layer.down})) {
      quantize(thread, gate, ffn);
      pool.barrier();
    }
    multiply(kernels(), with(acts, gate, ffn), {{&layer.down, y}}, share(blocks(layer.down), thread, threads), true);
  }
};

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

void run_layers(Context& context, const std::vector<LayerOn>& layers, Plan& plan, const float* cos, const float* sin, const float* x, float* y) {
  std::lock_guard<std::mutex> lock(context.busy);
  std::vector<Pass> passes;
  int64_t bytes = 0;
  for (const LayerOn& on : layers) {
    const Layer& layer = *on.layer;
    const Plan::Seen& seen = plan.seen(layer.window);
    const float* from = passes.empty() ? x : y;  // later layers work in place
    passes.push_back({context, layer, plan, seen, *on.kv, cos, sin, from, y, context.pool.threads(), plan.rows(), round_up(layer.head_dim, kLanes), layer.gate.weight->n()});
    Pass& pass = passes.back();
    for (const RowTile& tile : seen.tiles)
      pass.scratch_floats = std::max(pass.scratch_floats, attend_scratch(tile.count * (layer.heads / layer.kv_heads), tile.seen, pass.padded));
    pass.scratch_floats = round_up(pass.scratch_floats, kLanes);
    bytes = std::max(bytes, pass.cut(nullptr));
  }
  context.scratch.grow(bytes);
  for (Pass& pass : passes) pass.cut(context.scratch.data());
  const auto work = [&](int thread) {
    for (size_t i = 0; i < passes.size(); i++) {
      if (i) context.pool.barrier();
      passes[i].run(thread);
    }
  };
  context.pool.run(std::ref(work));
}

void run_linear(Context& context, const Weight& weight, const float* bias, const float* x, int64_t rows, float* y) {
  std::lock_guard<std::mutex> lock(context.busy);
  const bool integer = !is_dense(weight.format());
  Cutter sizes(nullptr);
  if (integer) {
    cut_acts(sizes, rows, weight.k());
    context.scratch.grow(sizes.used());
  }
  Cutter memory(context.scratch.data());
  const Acts a = with(integer ? cut_acts(memory, rows, weight.k()) : plain(rows), x, weight.k());
  const auto work = [&](int thread) {
    if (integer) {
      const Range mine = share(rows, thread, context.pool.threads());
      for (int64_t r = mine.from; r < mine.to; r++) quantize_row(*context.kernels, a, r);
      context.pool.barrier();
    }
    const Range blocks = share(weight.blocks(), thread, context.pool.threads());
    if (blocks.from < blocks.to) context.kernels->linear(weight.view(), a, blocks.from, blocks.to, y, weight.n(), bias, false);
  };
  context.pool.run(std::ref(work));
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

}  // namespace outrider
