// What attention needs to know about one forward pass, worked out once for all its layers.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "common.h"

namespace outrider {

// The fields of Batch that say who sees what; see its docstring. Pointers are only used while the plan is made.
struct BatchView {
  int64_t rows, seqs, table_width, words, block_size;
  const int64_t *positions, *slots, *block_tables, *ancestors;  // ancestors may be null
  std::vector<int64_t> cu_rows, kv_len, tail_start;
};

// Rows that go through a layer at a time: what they need between two phases stays in the cache.
constexpr int64_t kPanel = 128;

// Consecutive rows of one sequence that are attended together, and the stretches from .. to that any of them sees. In
// those below `common` all rows have the same slots.
struct RowTile {
  int64_t first, count, from, to, common;
};

class Plan {
 public:
  // Throws std::invalid_argument for anything out of range.
  explicit Plan(const BatchView& batch);

  int64_t rows() const { return static_cast<int64_t>(slots_.size()); }
  int64_t max_slot() const { return max_slot_; }
  const int64_t* slots() const { return slots_.data(); }
  const int64_t* positions() const { return positions_.data(); }

  struct Seen {
    std::vector<SeenRow> rows;
    std::vector<RowTile> tiles;
    std::vector<std::vector<int32_t>> own;  // lists of rows that see no plain stretch of slots
  };
  // Window 0: everything. Made on first use; the caller sees to it that no two threads do that at once.
  const Seen& seen(int64_t window);

 private:
  RowTile tile(const Seen& seen, int64_t seq, int64_t first, int64_t count) const;

  int64_t max_slot_ = 0;
  std::vector<int64_t> slots_, positions_, cu_rows_, kv_len_, tail_start_, words_;
  int64_t width_ = 0;  // ancestor words of a row
  std::vector<std::vector<int32_t>> lists_;  // physical slots of each sequence, in logical order
  std::map<int64_t, Seen> seen_;
};

}  // namespace outrider
