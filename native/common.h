// What every file shares: formats, instruction sets, and the plain views that kernels work on.
#pragma once

#include <cstdint>

namespace outrider {

constexpr int kLanes = 16;  // outputs in a block of weights, and floats in a vector
constexpr int kGroup = 32;  // inputs that share a scale

// How a weight is stored. All integer formats hold unsigned bytes or nibbles, as x86's u8 x s8 dot product wants them.
enum class Format : int {
  f32,
  bf16,
  i8,   // one fp32 scale for each output; codes are s8 + 128
  q8,   // GGUF Q8_0: an fp16 scale for each group; codes are s8 + 128
  q4,   // GGUF Q4_0: w = d * (code - 8)
  q4m,  // GGUF Q4_1: w = d * code + m
};
constexpr int kFormats = 6;

constexpr bool is_dense(Format f) { return f == Format::f32 || f == Format::bf16; }

// Bytes of one group of 16 outputs x 32 inputs with its scales (dense: of one input).
constexpr int64_t unit_bytes(Format f) {
  return f == Format::f32 ? 64 : f == Format::bf16 ? 32 : f == Format::i8 ? 512 : f == Format::q8 ? 544 : f == Format::q4 ? 288 : 320;
}

// Bytes of one block: 16 outputs, all inputs.
constexpr int64_t block_bytes(Format f, int64_t k) {
  return is_dense(f) ? k * unit_bytes(f) : k / kGroup * unit_bytes(f) + (f == Format::i8 ? 64 : 0);
}

// A packed weight [n, k]: blocks of 16 outputs, one after the other.
struct WeightView {
  Format format;
  int64_t n, k;
  const uint8_t* data;
};

// Rows are cut in tiles of at most `tile` rows, as even as can be; one tile runs through a block of weights at a time.
struct Tiles {
  int64_t rows, count;
  Tiles(int64_t rows, int64_t tile) : rows(rows), count((rows + tile - 1) / tile) {}
  int64_t size(int64_t t) const { return rows / count + (t < rows % count); }
  int64_t start(int64_t t) const { return t * (rows / count) + (t < rows % count ? t : rows % count); }
};

// Activations of one matrix product. `x` [rows, k] is fp32 (dense weights read it). The others hold the same in 8 bits:
// group g of row r of the tile that starts at row s and has R rows is number s * groups + g * R + (r - s), so that a
// tile is one stretch of memory and a kernel needs a single pointer into it.
struct Acts {
  int64_t rows, k;
  const float* x;
  int8_t* q;        // [groups of all rows][32]
  float* scale;     // one a group
  float* shift;     // scale * (sum of the group's q): what a weight's minimum is multiplied by
  int32_t* start8;  // -8 * sum and -128 * sum: where the integer sum starts, to undo the codes' offset
  int32_t* start128;
};

enum class KVFormat : int { f32, f16, bf16, i8 };

constexpr int64_t element_bytes(KVFormat f) { return f == KVFormat::f32 ? 4 : f == KVFormat::i8 ? 1 : 2; }

// Keys or values, [heads, slots, dim]; i8 are codes, with `scale` [heads, slots, groups of 32 dims].
struct KVHalf {
  void* data;
  float* scale;
};

// One layer's paged KV. Its vectors are counted head by head, slot by slot: a block's slots of one head are neighbours.
struct KVView {
  KVHalf k, v;
  KVFormat format;
  int64_t heads, slots, dim;

  int64_t bytes() const { return dim * element_bytes(format); }  // of a vector
  int64_t groups() const { return (dim + kGroup - 1) / kGroup; }
  void* vector(const KVHalf& half, int64_t i) const { return static_cast<char*>(half.data) + i * bytes(); }
  float* scale(const KVHalf& half, int64_t i) const { return half.scale ? half.scale + i * groups() : nullptr; }
};

// Attention goes through positions in stretches of this many: what a stretch adds is worked out on its own, and then
// added up stretch by stretch. So stretches can be shared out among threads, and every row still has one fixed order.
constexpr int64_t kStretch = 128;

// A row of attention: it sees the slots list[begin .. end). A slot's place in the list is its position.
struct SeenRow {
  const int32_t* list;
  int64_t begin, end;
  int64_t first_stretch() const { return begin / kStretch; }
  int64_t end_stretch() const { return (end + kStretch - 1) / kStretch; }
};

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// What one query has gathered so far: the values' weighted sum [padded], then the greatest score and the weights' sum.
inline int64_t state_floats(int64_t padded) { return padded + kLanes; }

// One stretch, for some rows, which share `list`, and some query heads, which share one KV head.
struct AttendTask {
  const SeenRow* rows;
  int64_t n_rows, n_heads;
  // [n_rows][q_stride], each head padded to `padded` floats; scaled for weights that are powers of 2, and with KV in bf16
  // of that precision.
  const float* q;
  int64_t q_stride, padded;
  KVView kv;
  int64_t kv_head, stretch;
  float* states;  // [n_rows * n_heads][state_floats]; those of rows that see nothing of the stretch hold nothing of use
  float* scratch;  // attend_scratch() floats
  // Keys that are needed next: asked for from memory meanwhile. None if `n_ahead` is 0.
  const int32_t* ahead;
  int64_t n_ahead, ahead_head;
};

// Scores, 16 keys turned around, and copies of a stretch; by tiles instead a TileScratch and two copies of half the size.
constexpr int64_t kTileFloats = 40 * kStretch;
inline int64_t attend_scratch(int64_t queries, int64_t padded) { return queries * kStretch + kTileFloats + (kLanes + kStretch) * padded; }

// The operations of one instruction set. All sets give the same bits: every sum is taken in one fixed order, with
// fused multiply-adds where the code says so and nowhere else.
struct Kernels {
  const char* name;
  int64_t tile;
  // Outputs of the blocks b0 .. b1 for all rows. `bias` is padded to whole blocks or null; `add` adds to what y holds.
  void (*linear)(const WeightView& w, const Acts& a, int64_t b0, int64_t b1, float* y, int64_t ldy, const float* bias, bool add);
  // One row to 8 bits; `step` is the number of rows in its tile, `at` its group 0.
  void (*quantize)(const float* x, int64_t k, int64_t step, int64_t at, const Acts& to);
  // What that rounding left over, fp32 [k].
  void (*left_over)(const float* x, int64_t k, int64_t step, int64_t at, const Acts& of, float* y);
  // Where the greatest of n numbers is, the first of equals, and its value; -1 if one of them is not finite.
  int64_t (*greatest)(const float* x, int64_t n, float* value);
  void (*norm)(const float* x, const float* weight, float eps, int64_t k, float* y);
  void (*silu_mul)(const float* gate, const float* up, int64_t n, float* y);
  // One head: optional norm, rotation by cos/sin [dim / 2], times `scale`.
  void (*rotate)(const float* x, const float* norm, float eps, const float* cos, const float* sin, int64_t dim, float scale, float* y);
  // Into vector `i` of `half`. What is stored depends on x alone.
  void (*store_kv)(const float* x, const KVView& kv, const KVHalf& half, int64_t i);
  void (*prefetch_kv)(const KVView& kv, const KVHalf& half, int64_t head, const int32_t* slots, int64_t n);
  // To the precision of bf16, in place; NaN stays NaN.
  void (*round_queries)(float* x, int64_t n);
  // Each thread calls these around all its tasks of attention: setting up tiles takes a tenth of a task.
  void (*begin_attend)();
  void (*end_attend)();
  void (*attend)(const AttendTask& task);
  // Adds a later stretch's state to that of the ones before it.
  void (*merge)(float* state, const float* later, int64_t padded);
  // The weighted mean that a state stands for.
  void (*finish)(const float* state, int64_t padded, int64_t dim, float* out);
};

const Kernels* kernels_portable();
const Kernels* kernels_avx2();
const Kernels* kernels_avx2_vnni();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512_vnni();
const Kernels* kernels_avx512_amx();
const Kernels* kernels_neon();

}  // namespace outrider
