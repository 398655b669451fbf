// Cases that run the kernels and hand back every byte they wrote; scripts/emulate_arm.py compares these. No library is
// linked: the image runs on a bare emulated processor.
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "../native/common.h"
#include "../native/half.h"

using namespace outrider;

extern "C" {
void* memcpy(void* to, const void* from, size_t n) {
  for (size_t i = 0; i < n; i++) static_cast<volatile char*>(to)[i] = static_cast<const char*>(from)[i];
  return to;
}
void* memset(void* to, int value, size_t n) {
  for (size_t i = 0; i < n; i++) static_cast<volatile char*>(to)[i] = static_cast<char>(value);
  return to;
}
}

namespace {

alignas(64) uint8_t memory[24 << 20];
constexpr int64_t kGap = 8192;  // kernels prefetch past the end, which is harmless, and must not write there

struct Case {
  const Kernels& kernels;
  uint8_t* out;
  int64_t written = 0, used = 0;
  uint64_t seed;

  Case(const Kernels& kernels, uint8_t* out, int number)
      : kernels(kernels), out(out), seed(0x9e3779b97f4a7c15u * static_cast<uint64_t>(number + 1)) {}

  template <class T>
  T* take(int64_t n) {
    T* p = reinterpret_cast<T*>(memory + used);
    std::memset(p, 0x5a, static_cast<size_t>(n) * sizeof(T));
    used += round_up(n * static_cast<int64_t>(sizeof(T)), 64);
    return p;
  }
  uint32_t random() {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(seed >> 32);
  }
  float number(float most) { return (static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f) * most; }
  float* floats(int64_t n, float most = 1.0f) {
    float* p = take<float>(n);
    for (int64_t i = 0; i < n; i++) p[i] = number(most);
    return p;
  }
  // What a NaN's other bits are depends on the processor.
  void put(const float* p, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
      const uint32_t bits = p[i] == p[i] ? to_bits(p[i]) : 0x7fc00000u;
      std::memcpy(out + written, &bits, 4), written += 4;
    }
  }
  template <class T>
  void put_integers(const T* p, int64_t n) {
    std::memcpy(out + written, p, static_cast<size_t>(n) * sizeof(T)), written += n * static_cast<int64_t>(sizeof(T));
  }
};

WeightView random_weight(Case& c, Format f, int64_t n, int64_t k) {
  const int64_t blocks = (n + kLanes - 1) / kLanes, bytes = block_bytes(f, k);
  uint8_t* p = c.take<uint8_t>(blocks * bytes + kGap);
  const WeightView view = {f, n, k, p};
  for (int64_t b = 0; b < blocks; b++, p += bytes) {
    for (int64_t i = 0; i < bytes; i++) p[i] = static_cast<uint8_t>(c.random() >> 24);
    const auto number = [&](uint8_t* at, bool wide, float most) {
      const float f32 = c.number(most);
      const uint16_t f16 = to_half(f32);
      std::memcpy(at, wide ? static_cast<const void*>(&f32) : &f16, wide ? 4 : 2);
    };
    if (f == Format::f32) {
      for (int64_t i = 0; i < bytes; i += 4) number(p + i, true, 0.25f);
    } else if (f == Format::bf16) {
      for (int64_t i = 0; i < bytes; i += 2) p[i + 1] = static_cast<uint8_t>((p[i + 1] & 0x80) | 0x3d);
    } else if (f == Format::i8) {
      for (int64_t i = bytes - 64; i < bytes; i += 4) number(p + i, true, 0.01f);
    } else {
      const int64_t unit = unit_bytes(f);  // scales (and minimums) end each group; tiny ones are subnormal
      for (int64_t g = 0; g < bytes; g += unit)
        for (int64_t i = g + (f == Format::q8 ? 512 : 256); i < g + unit; i += 2)
          number(p + i, false, c.random() % 8 ? 0.02f : 2e-5f);
    }
  }
  return view;
}

Acts quantized(Case& c, const float* x, int64_t rows, int64_t k) {
  const int64_t groups = rows * (k / kGroup);
  Acts a = {rows, k, x, nullptr, nullptr, nullptr, nullptr, nullptr};
  a.q = c.take<int8_t>(groups * kGroup), a.scale = c.take<float>(groups), a.shift = c.take<float>(groups);
  a.start8 = c.take<int32_t>(groups), a.start128 = c.take<int32_t>(groups);
  const Tiles tiles(rows, c.kernels.tile);
  for (int64_t t = 0; t < tiles.count; t++)
    for (int64_t r = 0; r < tiles.size(t); r++)
      c.kernels.quantize(x + (tiles.start(t) + r) * k, k, tiles.size(t), tiles.start(t) * (k / kGroup) + r, a);
  return a;
}

void linear_case(Case& c, Format f) {
  for (int64_t rows : {1, 2, 3, 4, 5, 7, 8, 12, 13, 24})
    for (int64_t n : {16, 37})
      for (int64_t k : {32, is_dense(f) ? 75 : 96}) {
        c.used = 0;
        const WeightView w = random_weight(c, f, n, k);
        const float *x = c.floats(rows * k, 3.0f), *bias = c.floats(round_up(n, kLanes));
        const Acts a = is_dense(f) ? Acts{rows, k, x, nullptr, nullptr, nullptr, nullptr, nullptr} : quantized(c, x, rows, k);
        float* y = c.floats(rows * n + kLanes);
        c.kernels.linear(w, a, 0, 1, y, n, bias, true);
        c.kernels.linear(w, a, 1, (n + kLanes - 1) / kLanes, y, n, nullptr, false);
        c.put(y, rows * n + kLanes);
      }
}

// The largest sums that 8-bit codes can have, of either sign.
void extreme_case(Case& c) {
  for (Format f : {Format::i8, Format::q8, Format::q4, Format::q4m})
    for (int codes : {0x00, 0xff})
      for (float value : {1.0f, -1.0f}) {
        c.used = 0;
        const int64_t k = 64;
        const WeightView w = random_weight(c, f, 16, k);
        const int64_t unit = unit_bytes(f), held = f == Format::i8 || f == Format::q8 ? 512 : 256;
        for (int64_t g = 0; g < k / kGroup; g++) std::memset(const_cast<uint8_t*>(w.data) + g * unit, codes, static_cast<size_t>(held));
        float *x = c.take<float>(2 * k), *y = c.take<float>(32);
        for (int64_t i = 0; i < 2 * k; i++) x[i] = value;
        c.kernels.linear(w, quantized(c, x, 2, k), 0, 1, y, 16, nullptr, false);
        c.put(y, 32);
      }
}

void quantize_case(Case& c) {
  const int64_t k = 192;
  float *x = c.floats(2 * k), *y = c.take<float>(k);
  const float infinity = from_bits(0x7f800000u), nan = from_bits(0x7fc00000u);
  const float special[] = {0.0f, -0.0f, 1e-38f, 1e-45f, 1e-31f, 127.0f, 63.5f, -0.5f, 0.5f, 1.5f, 3e38f};
  for (int64_t i = 0; i < 32; i++) x[i] = i ? static_cast<float>(i - 16) + 0.5f : 127.0f;  // ties
  for (int64_t i = 0; i < 11; i++) x[32 + i] = special[i];
  for (int64_t i = 0; i < 32; i++) x[64 + i] *= 1e-31f;
  x[128] = nan, x[161] = infinity, x[175] = -infinity;
  const Acts a = quantized(c, x, 2, k);
  c.put_integers(a.q, 2 * k);
  c.put(a.scale, 2 * k / kGroup);
  c.put(a.shift, 2 * k / kGroup);
  c.put_integers(a.start8, 2 * k / kGroup);
  c.put_integers(a.start128, 2 * k / kGroup);
  for (int64_t r = 0; r < 2; r++) {
    c.kernels.left_over(x + r * k, k, 2, r, a, y);
    c.put(y, k);
  }
}

void rows_case(Case& c) {
  const float special[] = {from_bits(0x7fc00000u), from_bits(0x7f800000u), from_bits(0xff800000u), 0.0f, -0.0f, 87.0f, 88.0f, -88.0f, 1e30f};
  for (int64_t k : {7, 16, 33, 64, 100, 576})
    for (int again = 0; again < 8; again++) {
      c.used = 0;
      float *x = c.floats(k, 90.0f), *w = c.floats(k), *y = c.take<float>(k);
      c.kernels.norm(x, w, 1e-5f, k, y);
      c.put(y, k);
      if (k > 16) std::memcpy(x + 3, special, sizeof(special));
      c.kernels.silu_mul(x, w, k, y);
      c.put(y, k);
    }
  for (int64_t dim : {20, 64, 96, 128})
    for (bool normed : {false, true}) {
      c.used = 0;
      const float *x = c.floats(dim), *w = c.floats(dim), *cos = c.floats(dim / 2), *sin = c.floats(dim / 2);
      float* y = c.take<float>(dim);
      c.kernels.rotate(x, normed ? w : nullptr, 1e-6f, cos, sin, dim, 0.125f, y);
      c.put(y, dim);
    }
}

void attention_case(Case& c, KVFormat f) {
  constexpr int64_t slots = 400, kv_heads = 2, most_rows = 4;
  for (int64_t dim : {20, 64, 80, 96, 128})
    for (int64_t queries : {1, 2, 4, 12, 20}) {  // few of them, which have a way of their own, and more
      const int64_t rows = queries < 4 ? 1 : most_rows, heads = queries / rows;
      c.used = 0;
      const int64_t padded = round_up(dim, kLanes), groups = (dim + kGroup - 1) / kGroup, state = state_floats(padded);
      const auto half = [&] {
        uint8_t* data = c.take<uint8_t>(kv_heads * slots * dim * element_bytes(f));
        return KVHalf{data, f == KVFormat::i8 ? c.take<float>(kv_heads * slots * groups) : nullptr};
      };
      const KVView kv = {half(), half(), f, kv_heads, slots, dim};
      for (const KVHalf* h : {&kv.k, &kv.v})
        for (int64_t i = 0; i < kv_heads * slots; i++) c.kernels.store_kv(c.floats(dim, 2.0f), kv, *h, i);
      for (const KVHalf* h : {&kv.k, &kv.v}) {
        c.put_integers(static_cast<const uint8_t*>(h->data), kv_heads * slots * kv.bytes());
        if (h->scale) c.put(h->scale, kv_heads * slots * groups);
      }
      int32_t* list = c.take<int32_t>(slots);
      for (int64_t i = 0; i < slots; i++) list[i] = static_cast<int32_t>(i / 8 * 8 + (i * 3) % 8);
      const SeenRow seen[most_rows] = {{list, 0, 260}, {list, 140, 262}, {list, 5, 380}, {list, 5, 380}};
      float* q = c.take<float>(rows * heads * padded);
      for (int64_t i = 0; i < rows * heads * padded; i++) q[i] = i % padded < dim ? c.number(2.0f) : 0.0f;
      if (f == KVFormat::bf16) c.kernels.round_queries(q, rows * heads * padded);
      c.put(q, rows * heads * padded);
      float* scratch = c.take<float>(attend_scratch(rows * heads, padded));
      float* states[3];
      for (int64_t s = 0; s < 3; s++) {
        states[s] = c.take<float>(rows * heads * state);
        AttendTask task = {};
        task.rows = seen, task.n_rows = rows, task.n_heads = heads, task.q = q, task.q_stride = heads * padded, task.padded = padded;
        task.kv = kv, task.kv_head = 1, task.stretch = s, task.states = states[s], task.scratch = scratch;
        c.kernels.attend(task);
      }
      float* y = c.take<float>(dim);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
          float* first = states[seen[r].first_stretch()] + (r * heads + h) * state;
          for (int64_t s = seen[r].first_stretch() + 1; s < seen[r].end_stretch(); s++)
            c.kernels.merge(first, states[s] + (r * heads + h) * state, padded);
          c.put(first, padded + 2);
          c.kernels.finish(first, padded, dim, y);
          c.put(y, dim);
        }
    }
}

}  // namespace

// Runs a case (CASES in emulate_arm.py names them) and returns how many bytes it wrote to `out`.
extern "C" int64_t run_case(int number, int neon, uint8_t* out) {
#ifdef OUTRIDER_NEON
  Case c(neon ? *kernels_neon() : *kernels_portable(), out, number);
#else
  (void)neon;
  Case c(*kernels_portable(), out, number);
#endif
  switch (number) {
    case 6: extreme_case(c); break;
    case 7: quantize_case(c); break;
    case 8: rows_case(c); break;
    default: number < kFormats ? linear_case(c, static_cast<Format>(number)) : attention_case(c, static_cast<KVFormat>(number - 9));
  }
  return c.written;
}
