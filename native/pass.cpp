// Decoder layers: what the threads do together, phase by phase.
#include <cmath>
#include <functional>

#include "share.h"

namespace outrider {
namespace {

// What each thread does for itself, as that is sooner done than waiting for the others: rows, states of stretches.
constexpr int64_t kFew = 8, kFewStates = 512;
constexpr int64_t kMostStates = int64_t{32} << 20;  // floats: 128 MiB, of stretches worked out apart

// Blocks `range` of several weights taken as one.
struct Product {
  const Linear* linear;
  float* y;
  bool again = false;  // what rounding the inputs left over: without bias, and nothing for floats
};

void multiply(const Kernels& kernels, const Acts& a, std::initializer_list<Product> products, Range range, bool add = false) {
  int64_t before = 0;
  for (const Product& p : products) {
    const Weight& w = *p.linear->weight;
    const int64_t from = std::max<int64_t>(range.from - before, 0), to = std::min(range.to - before, w.blocks());
    const float* bias = p.linear->bias.empty() || p.again ? nullptr : p.linear->bias.data();
    if (from < to && !(p.again && is_dense(w.format()))) kernels.linear(w.view(), a, from, to, p.y, w.n(), bias, add);
    before += w.blocks();
  }
}

// One layer's pass over one panel of rows. Each method is one phase, done together; barriers lie between them.
struct Pass {
  Context& context;
  const Layer& layer;
  const Plan& plan;
  const Plan::Seen& seen;
  const KVView& kv;
  const float *cos, *sin, *x;  // of the panel's first row
  float* y;
  int threads;
  int64_t first, rows;  // the panel
  const RowTile* tiles;
  int64_t n_tiles;
  int64_t hidden, q_width, kv_width, ffn, padded, shared;  // `shared`: query heads that share a KV head
  int64_t states = 0;  // queries whose states are kept; 0: each task gathers its own
  int64_t scratch_floats = 0;  // of one thread
  // Inputs of the products.
  struct Inputs {
    Acts acts, rest;
    float *normed, *left, *mixed;
  };
  bool alone = false, gathers_alone = false;  // each thread makes all inputs for itself, or those of the output projection
  std::vector<Inputs> inputs{};
  Acts inner{};
  float *q{}, *k{}, *v{}, *turned{}, *gate{}, *up{}, *state{}, *scratch{};

  const Kernels& kernels() const { return *context.kernels; }
  const Inputs& input(int thread) const { return inputs[alone ? static_cast<size_t>(thread) : 0]; }
  Range own_rows(int thread) const { return alone ? Range{0, rows} : share(rows, thread, threads); }

  // Inputs of every row that this thread rounds; see quantize_rows.
  Range own_inputs(int thread, int64_t width) const {
    const Range groups = alone ? Range{0, width / kGroup} : share(width / kGroup, thread, threads);
    return {groups.from * kGroup, groups.to * kGroup};
  }

  // Few pieces: the stretches are worked out apart, so that all threads have something to do, and added up afterwards.
  // Who does what changes no bits.
  void plan_attention() {
    alone = rows <= kFew;
    int64_t most = 0;
    for (int64_t i = 0; i < n_tiles; i++) {
      most = std::max(most, tiles[i].count * shared);
      states += (tiles[i].to - tiles[i].from) * tiles[i].count * layer.heads;
    }
    // One tile is always worth it: without, one thread a KV head would do all of a long context.
    const bool fits = n_tiles == 1 || states * state_floats(padded) <= kMostStates;
    const bool apart = fits && n_tiles * layer.kv_heads < 4 * threads;
    if (!apart) states = 0;
    gathers_alone = alone && apart && states <= kFewStates;
    scratch_floats = round_up(attend_scratch(most, padded) + (apart ? 0 : 2 * most * state_floats(padded)), kLanes);
  }

  int64_t cut(uint8_t* memory) {
    Cutter cutter(memory);
    inputs.resize(alone ? static_cast<size_t>(threads) : 1);
    for (Inputs& in : inputs) {
      in.acts = cut_acts(cutter, rows, std::max(hidden, q_width) / kGroup * kGroup);
      in.rest = cut_acts(cutter, rows, hidden / kGroup * kGroup);
      in.normed = cutter.take<float>(rows * hidden);
      in.left = cutter.take<float>(rows * hidden);
      in.mixed = gathers_alone || &in == &inputs[0] ? cutter.take<float>(rows * q_width) : inputs[0].mixed;
    }
    inner = cut_acts(cutter, rows, ffn / kGroup * kGroup);
    q = cutter.take<float>(rows * q_width);
    k = cutter.take<float>(rows * kv_width);
    v = cutter.take<float>(rows * kv_width);
    turned = cutter.take<float>(rows * layer.heads * padded);
    gate = cutter.take<float>(rows * ffn);
    up = cutter.take<float>(rows * ffn);
    state = cutter.take<float>(states * state_floats(padded));
    scratch = cutter.take<float>(scratch_floats * threads);
    return cutter.used();
  }

  // Keys and values keep what rounding their input to 8 bits leaves over: a fifth of what all such rounding costs in
  // perplexity comes from there, and they are a small part of the products.
  bool fine() const { return any_integer({&layer.k, &layer.v}); }

  void norm(int thread, const float* from, const std::vector<float>& weight, bool quantize, bool keep_rest) {
    const Inputs& in = input(thread);
    const Range mine = own_rows(thread);
    for (int64_t r = mine.from; r < mine.to; r++) kernels().norm(from + r * hidden, weight.data(), layer.eps, hidden, in.normed + r * hidden);
    if (quantize) {
      if (!alone) context.pool.barrier();
      const Acts a = with(in.acts, in.normed, hidden), b = with(in.rest, in.left, hidden);
      quantize_rows(kernels(), a, own_inputs(thread, hidden));
      if (keep_rest) quantize_rests(kernels(), a, b, in.left, own_inputs(thread, hidden));
    }
    if (!alone) context.pool.barrier();
  }

  // Asks for the first keys of the thread's first piece of attention.
  void warm_keys(int thread) const {
    Cursor cursor{0, 0, state};
    const Piece p = piece(thread, cursor);
    if (!p.tile) return;
    const SeenRow& row = seen.rows[static_cast<size_t>(p.tile->first)];
    const int64_t from = std::max(row.begin, p.from * kStretch);
    kernels().prefetch_kv(kv, kv.k, p.kv_head, row.list + from, std::min(row.end - from, kStretch));
  }

  // Rotary embedding of queries and keys, KV writes: one head of one row is one piece of work.
  void rotate_and_store(int thread) {
    const int64_t heads = layer.heads, kv_heads = layer.kv_heads, dim = layer.head_dim, pieces = heads + kv_heads;
    constexpr float log2_e = 1.44269504f;  // attention's weights are powers of 2
    const float root = log2_e / std::sqrt(static_cast<float>(dim));
    const float* q_norm = layer.q_norm.empty() ? nullptr : layer.q_norm.data();
    const float* k_norm = layer.k_norm.empty() ? nullptr : layer.k_norm.data();
    const Range mine = share(rows * pieces, thread, threads);
    for (int64_t i = mine.from; i < mine.to; i++) {
      const int64_t row = i / pieces, piece = i % pieces, h = piece - heads;
      const float *c = cos + row * (dim / 2), *s = sin + row * (dim / 2);
      if (h < 0) {
        float* to = turned + (row * heads + piece) * padded;
        kernels().rotate(q + (row * heads + piece) * dim, q_norm, layer.eps, c, s, dim, root, to);
        if (kv.format == KVFormat::bf16) kernels().round_queries(to, dim);
        std::fill(to + dim, to + padded, 0.0f);
        continue;
      }
      float *key = k + (row * kv_heads + h) * dim, *value = v + (row * kv_heads + h) * dim;
      const int64_t at = h * kv.slots + plan.slots()[first + row];
      kernels().rotate(key, k_norm, layer.eps, c, s, dim, 1.0f, key);
      kernels().store_kv(key, kv, kv.k, at);
      kernels().store_kv(value, kv, kv.v, at);
    }
  }

  // A piece of attention: one tile and KV head, and one stretch or (if `states` is 0) all.
  struct Piece {
    const RowTile* tile;
    int64_t kv_head, from, to;
    float* states;  // of the stretch
  };

  // The piece number `i`, or none. Pieces are asked for in rising order; `cursor` remembers where the last one was.
  struct Cursor {
    int64_t tile = 0, before = 0;  // the tile, and the pieces before it
    float* states;
  };

  Piece piece(int64_t i, Cursor& cursor) const {
    for (; cursor.tile < n_tiles; cursor.tile++) {
      const RowTile& tile = tiles[cursor.tile];
      const int64_t pieces = layer.kv_heads * (states ? tile.to - tile.from : 1), at = i - cursor.before;
      const int64_t floats = tile.count * shared * state_floats(padded);
      if (at < pieces) {
        const int64_t kv_head = at % layer.kv_heads, stretch = tile.from + at / layer.kv_heads;
        return {&tile, kv_head, stretch, states ? stretch + 1 : tile.to, cursor.states + at * floats};
      }
      cursor.before += pieces;
      if (states) cursor.states += pieces * floats;
    }
    return {nullptr, 0, 0, 0, nullptr};
  }

  // Points `task` at the keys of a stretch, to be asked for ahead.
  void look_ahead(AttendTask& task, const RowTile& tile, int64_t kv_head, int64_t stretch) const {
    const SeenRow& row = seen.rows[static_cast<size_t>(tile.first)];
    task.ahead = row.list + stretch * kStretch;
    task.n_ahead = std::min(kStretch, row.end - stretch * kStretch), task.ahead_head = kv_head;
  }

  // One stretch of a tile; behind the slots that all its rows see, each row has a list of its own.
  void attend_stretch(AttendTask task, const Piece& p, int64_t stretch, float* to) const {
    task.stretch = stretch;
    task.kv_head = p.kv_head;
    const auto run = [&](int64_t row, int64_t n_rows) {
      task.rows = &seen.rows[static_cast<size_t>(row)];
      task.n_rows = n_rows;
      task.q = turned + ((row - first) * layer.heads + p.kv_head * shared) * padded;
      task.states = to + (row - p.tile->first) * shared * state_floats(padded);
      kernels().attend(task);
    };
    if (stretch < p.tile->common) return run(p.tile->first, p.tile->count);
    for (int64_t row = p.tile->first; row < p.tile->first + p.tile->count; row++) {
      const SeenRow& r = seen.rows[static_cast<size_t>(row)];
      if (stretch >= r.first_stretch() && stretch < r.end_stretch()) run(row, 1);
    }
  }

  // All stretches of a tile, added up as they come.
  void attend_tile(AttendTask& task, const Piece& p) const {
    const int64_t size = state_floats(padded), queries = p.tile->count * shared;
    float* sums = task.scratch + attend_scratch(queries, padded);
    float* fresh = sums + queries * size;
    for (int64_t stretch = p.from; stretch < p.to; stretch++) {
      if (stretch + 1 < p.to) look_ahead(task, *p.tile, p.kv_head, stretch + 1);
      attend_stretch(task, p, stretch, fresh);
      for (int64_t i = 0; i < queries; i++) {
        const SeenRow& row = seen.rows[static_cast<size_t>(p.tile->first + i / shared)];
        if (stretch == row.first_stretch()) {
          std::copy(fresh + i * size, fresh + (i + 1) * size, sums + i * size);
        } else if (stretch > row.first_stretch() && stretch < row.end_stretch()) {
          kernels().merge(sums + i * size, fresh + i * size, padded);
        }
      }
    }
    for (int64_t i = 0; i < queries; i++) finish(sums + i * size, p.tile->first + i / shared, p.kv_head * shared + i % shared, inputs[0].mixed);
  }

  void finish(const float* of, int64_t row, int64_t head, float* mixed) const {
    kernels().finish(of, padded, layer.head_dim, mixed + (row - first) * q_width + head * layer.head_dim);
  }

  // Threads take one piece after the other, and one ahead, so that its keys are on their way.
  void attend(int thread) {
    AttendTask task{};
    task.n_heads = shared, task.padded = padded, task.kv = kv;
    task.q_stride = layer.heads * padded;
    task.scratch = scratch + thread * scratch_floats;
    Cursor cursor{0, 0, state};
    kernels().begin_attend();
    for (Piece now = piece(context.pool.next(), cursor); now.tile;) {
      const Piece after = piece(context.pool.next(), cursor);
      task.n_ahead = 0;
      if (after.tile) look_ahead(task, *after.tile, after.kv_head, after.from);
      if (states)
        attend_stretch(task, now, now.from, now.states);
      else
        attend_tile(task, now);
      now = after;
    }
    kernels().end_attend();
  }

  // Adds up what was worked out apart, and makes the rows ready for the output projection.
  void gather(int thread, bool quantize) {
    const int64_t size = state_floats(padded);
    const Inputs& in = input(thread);
    const Range mine = gathers_alone ? Range{0, rows} : share(rows, thread, threads);
    float* from = state;
    for (int64_t i = 0; states && i < n_tiles; i++) {
      const RowTile& tile = tiles[i];
      const int64_t queries = tile.count * shared;
      for (int64_t row = std::max(tile.first, first + mine.from); row < std::min(tile.first + tile.count, first + mine.to); row++) {
        const SeenRow& r = seen.rows[static_cast<size_t>(row)];
        for (int64_t head = 0; head < layer.heads; head++) {
          const auto of = [&](int64_t stretch) {
            const int64_t task = (stretch - tile.from) * layer.kv_heads + head / shared;
            return from + (task * queries + (row - tile.first) * shared + head % shared) * size;
          };
          float* const sum = scratch + thread * scratch_floats;
          std::copy(of(r.first_stretch()), of(r.first_stretch()) + size, sum);
          for (int64_t s = r.first_stretch() + 1; s < r.end_stretch(); s++) kernels().merge(sum, of(s), padded);
          finish(sum, row, head, in.mixed);
        }
      }
      from += (tile.to - tile.from) * layer.kv_heads * queries * size;
    }
    if (states && !gathers_alone) context.pool.barrier();
    if (!quantize) return;
    quantize_rows(kernels(), with(in.acts, in.mixed, q_width), own_inputs(thread, q_width));
    if (!alone) context.pool.barrier();
  }

  // Gate and up projection of the same outputs, one after the other, then the gate while both are in the cache.
  void gate_up(int thread) {
    const Acts a = with(input(thread).acts, input(thread).normed, hidden), b = with(inner, gate, ffn);
    const bool quantize = any_integer({&layer.down});
    const int64_t unit = quantize ? kGroup / kLanes : 1;  // blocks that stay together
    context.pool.each(thread, layer.gate.weight->blocks() / unit, [&](Range units) {
      const Range blocks = {units.from * unit, units.to * unit};
      multiply(kernels(), a, {{&layer.gate, gate}}, blocks);
      multiply(kernels(), a, {{&layer.up, up}}, blocks);
      const int64_t from = blocks.from * kLanes, to = std::min(blocks.to * kLanes, ffn);
      for (int64_t r = 0; r < rows; r++) {
        float* g = gate + r * ffn + from;
        kernels().silu_mul(g, up + r * ffn + from, to - from, g);
        if (quantize) quantize_row(kernels(), b, r, from, to);
      }
    });
  }

  void run(int thread) {
    const auto blocks = [](const Linear& l) { return l.weight->blocks(); };
    Pool& pool = context.pool;
    const Inputs& mine = input(thread);
    const int64_t coarse = blocks(layer.q);
    norm(thread, x, layer.input_norm, any_integer({&layer.q, &layer.k, &layer.v}), fine());
    pool.each(thread, coarse + blocks(layer.k) + blocks(layer.v), [&](Range in) {
      multiply(kernels(), with(mine.acts, mine.normed, hidden), {{&layer.q, q}, {&layer.k, k}, {&layer.v, v}}, in);
      if (!fine()) return;
      const Range again = {std::max<int64_t>(in.from - coarse, 0), in.to - coarse};
      multiply(kernels(), with(mine.rest, mine.left, hidden), {{&layer.k, k, true}, {&layer.v, v, true}}, again, true);
    });
    pool.barrier();
    warm_keys(thread);
    rotate_and_store(thread);
    pool.barrier();
    attend(thread);
    pool.barrier();
    if (states || any_integer({&layer.o})) gather(thread, any_integer({&layer.o}));
    pool.each(thread, blocks(layer.o), [&](Range out) {
      const int64_t from = out.from * kLanes, to = std::min(out.to * kLanes, hidden);
      for (int64_t r = 0; x != y && r < rows; r++) std::copy(x + r * hidden + from, x + r * hidden + to, y + r * hidden + from);
      multiply(kernels(), with(mine.acts, mine.mixed, q_width), {{&layer.o, y}}, out, true);
    });
    pool.barrier();
    norm(thread, y, layer.post_norm, any_integer({&layer.gate, &layer.up}), false);
    gate_up(thread);
    pool.barrier();
    pool.each(thread, blocks(layer.down), [&](Range out) {
      multiply(kernels(), with(inner, gate, ffn), {{&layer.down, y}}, out, true);
    });
  }
};

}  // namespace

void run_layers(Context& context, const std::vector<LayerOn>& layers, Plan& plan, const float* cos, const float* sin, const float* x, float* y) {
  std::lock_guard<std::mutex> lock(context.busy);
  std::vector<Pass> passes;
  int64_t bytes = 0;
  for (const LayerOn& on : layers) {
    const Layer& layer = *on.layer;
    const Plan::Seen& seen = plan.seen(layer.window);
    const int64_t hidden = layer.hidden(), half = layer.head_dim / 2;
    const float* from = passes.empty() ? x : y;  // later layers work in place
    const RowTile *tile = seen.tiles.data(), *const last = tile + seen.tiles.size();
    // A row sees no later one, so the panels may follow each other.
    while (tile != last) {
      const RowTile* const begin = tile;
      int64_t rows = 0;
      for (; tile != last && rows + tile->count <= kPanel; tile++) rows += tile->count;
      const int64_t first = begin->first;
      Pass pass{context, layer, plan, seen, *on.kv, cos + first * half, sin + first * half, from + first * hidden, y + first * hidden,
                context.pool.threads(), first, rows, begin, tile - begin, hidden, layer.heads * layer.head_dim,
                layer.kv_heads * layer.head_dim, layer.gate.weight->n(), round_up(layer.head_dim, kLanes), layer.heads / layer.kv_heads};
      pass.plan_attention();
      bytes = std::max(bytes, pass.cut(nullptr));
      passes.push_back(pass);
    }
  }
  context.scratch.grow(bytes);
  for (Pass& pass : passes) pass.cut(context.scratch.data());
  const auto work = [&](int thread) {
    for (size_t i = 0; i < passes.size(); i++) {
      if (i) context.pool.barrier();
      if (Cutter::kGap) {  // it has the gaps of the last one's pieces, which lie elsewhere
        if (!thread) passes[i].cut(context.scratch.data());
        context.pool.barrier();
      }
      passes[i].run(thread);
    }
  };
  context.pool.run(std::ref(work));
}

}  // namespace outrider
