// Causal attention of one hybrid batch over the paged KV cache: chunks of several requests and all decodes alike.
//
// A block holds the keys of a head as one tile (or more) of 16 keys, and its values as tiles of 16 dimensions over the
// block's keys, so that scores and sums of values are products like any other, and a group of query heads reads a key
// once. The softmax is taken along the keys as they come (Milakov and Gimelshein 2018, arXiv 1805.02867).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "matmul.h"

namespace stallfree {

constexpr int kTileRows = 48;    // rows of a task: a row is one query of one head
constexpr int kSpanKeys = 128;   // keys that are looked at together
constexpr int kMostHeadDim = 256;

// The KV cache as the attention of one layer sees it.
struct CacheLayer {
  char* keys;
  char* values;
};

// Sizes in bytes; a block is [kv heads][block_size * head_dim].
struct CacheShape {
  int block_size;
  int num_kv_heads;
  int head_dim;
  std::int64_t head_bytes;   // of one head in one block
  std::int64_t block_bytes;
};

// As in Python's `BlockTables`.
struct BlockTable {
  const std::int32_t* blocks;  // to the end of the sequence, at least
  std::int64_t num_forgotten;  // blocks before the first of these
};
static_assert(sizeof(BlockTable) == 16);

// The tables of all sequences in one KV group. Positions in a table count from its first token.
struct GroupTables {
  const BlockTable* first;
  int stride;                // from a sequence's table to the next one's
  const std::int32_t* ends;  // [num_sequences]: tokens of the text before and in this step
  int block_size;

  const BlockTable& of(int sequence) const { return first[std::ptrdiff_t{sequence} * stride]; }
  // Of the text, before the table.
  std::int64_t start(int sequence) const { return of(sequence).num_forgotten * block_size; }
  int length(int sequence) const { return static_cast<int>(ends[sequence] - start(sequence)); }
};

struct AttentionRule {
  float scale;
  float softcap;  // 0: none
  int window;     // 0: none
};

// Queries `first` to `end` of a sequence, for the query heads of one KV head.
struct AttentionTask {
  int sequence;
  int kv_head;
  int first;
  int end;
};

// A thread's own memory for one task.
template <class T>
struct AttentionScratch {
  alignas(64) T queries[kTileRows * kMostHeadDim];
  alignas(64) float scores[kTileRows * kSpanKeys];
  alignas(64) T shares[kTileRows * kSpanKeys];
  alignas(64) float sums[kTileRows * kMostHeadDim];
  alignas(64) float largest[kTileRows];
  alignas(64) float total[kTileRows];
};

// Puts a token's key, [head_dim] of one head, at place `slot` of a block.
template <class T>
void write_key(char* head, const float* key, int slot, int head_dim) {
  constexpr int kPer = Numbers<T>::kPerLane;
  alignas(64) T rounded[kMostHeadDim];
  for (int d = 0; d < head_dim; d += kWidth) {
    Numbers<T>::store(rounded + d, _mm512_loadu_ps(key + d));
  }
  const int num_lanes = head_dim / kPer;
  char* tile = head + std::ptrdiff_t{slot / kWidth} * num_lanes * 64 + (slot % kWidth) * 4;
  for (int lane = 0; lane < num_lanes; ++lane) {
    std::memcpy(tile + lane * 64, rounded + lane * kPer, 4);
  }
}

template <class T>
void write_value(char* head, const float* value, int slot, int head_dim, int block_size) {
  constexpr int kPer = Numbers<T>::kPerLane;
  const int lanes = block_size / kPer;
  for (int d = 0; d < head_dim; d += kWidth) {
    alignas(64) T rounded[kWidth];
    Numbers<T>::store(rounded, _mm512_loadu_ps(value + d));
    T* row = reinterpret_cast<T*>(head + std::ptrdiff_t{d / kWidth} * lanes * 64 + (slot / kPer) * 64);
    for (int i = 0; i < kWidth; ++i) {
      row[i * kPer + slot % kPer] = rounded[i];
    }
  }
}

template <class T>
class Attention {
 public:
  Attention(const CacheShape& shape, const CacheLayer& layer, const GroupTables& tables, const AttentionRule& rule,
            int num_heads)
      : shape_(shape),
        layer_(layer),
        tables_(tables),
        rule_(rule),
        num_heads_(num_heads),
        group_(num_heads / shape.num_kv_heads) {}

  // q and out: [num_tokens, num_heads, head_dim], `first_row` is the row of the sequence's first query.
  void compute(const AttentionTask& task, const T* q, T* out, int first_row, int num_queries,
               AttentionScratch<T>& own) const {
    const int head_dim = shape_.head_dim;
    const int num_rows = (task.end - task.first) * group_;
    const int offset = tables_.length(task.sequence) - num_queries;  // of the first query among the keys
    for (int row = 0; row < num_rows; ++row) {
      std::memcpy(own.queries + row * head_dim, at(q, first_row, task, row), sizeof(T) * head_dim);
      own.largest[row] = -std::numeric_limits<float>::infinity();
      own.total[row] = 0.0f;
    }
    std::fill_n(own.sums, num_rows * head_dim, 0.0f);
    const int end_key = offset + task.end;
    const int first_key = rule_.window ? std::max(0, offset + task.first - rule_.window + 1) : 0;
    // Spans begin at multiples of their size in the text, not in the table: a row's result must not depend on how much
    // of a window's past is forgotten.
    const int phase = static_cast<int>(tables_.start(task.sequence) % kSpanKeys);
    const int first_block = first_key / shape_.block_size * shape_.block_size;
    for (int key = (first_key + phase) / kSpanKeys * kSpanKeys - phase; key < end_key; key += kSpanKeys) {
      const int first = std::max(key, first_block);
      add_span(task, offset, first, std::min(key + kSpanKeys, end_key), num_rows, own);
    }
    for (int row = 0; row < num_rows; ++row) {
      const __m512 share = _mm512_set1_ps(1.0f / own.total[row]);
      T* to = const_cast<T*>(at(out, first_row, task, row));
      for (int d = 0; d < head_dim; d += kWidth) {
        Numbers<T>::store(to + d, _mm512_mul_ps(share, _mm512_loadu_ps(own.sums + row * head_dim + d)));
      }
    }
  }

 private:
  const T* at(const T* rows, int first_row, const AttentionTask& task, int row) const {
    const std::int64_t token = first_row + task.first + row / group_;
    return rows + (token * num_heads_ + task.kv_head * group_ + row % group_) * shape_.head_dim;
  }

  const char* head_of(const char* cache, const AttentionTask& task, int block) const {
    const std::int32_t number = tables_.of(task.sequence).blocks[block];
    return cache + number * shape_.block_bytes + task.kv_head * shape_.head_bytes;
  }

  // Takes keys `first` to `end` into the sums; `first` is the first of a block.
  void add_span(const AttentionTask& task, int offset, int first, int end, int num_rows,
                AttentionScratch<T>& own) const {
    constexpr int kPer = Numbers<T>::kPerLane;
    const int head_dim = shape_.head_dim, block_size = shape_.block_size;
    const std::ptrdiff_t key_tile_bytes = std::ptrdiff_t{head_dim} / kPer * 64;
    const int num_tiles = (end - first + kWidth - 1) / kWidth;
    const char* key_tiles[kSpanKeys / kWidth];
    const char* value_blocks[kSpanKeys / kWidth];
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int key = first + tile * kWidth;
      key_tiles[tile] = head_of(layer_.keys, task, key / block_size) + key % block_size / kWidth * key_tile_bytes;
    }
    const int num_blocks = (end - first + block_size - 1) / block_size;
    for (int block = 0; block < num_blocks; ++block) {
      value_blocks[block] = head_of(layer_.values, task, first / block_size + block);
    }
    prefetch(value_blocks, num_blocks, shape_.head_bytes);
    score(key_tiles, num_tiles, num_rows, own);
    prefetch_next_keys(task, end, offset + task.end);
    const int num_keys = std::min(num_blocks * block_size, kSpanKeys);
    for (int row = 0; row < num_rows; ++row) {
      soften(offset + task.first + row / group_, first, end, num_keys, row, own);
    }
    const Tiles tiles{value_blocks, std::ptrdiff_t{block_size} / kPer * 64, num_blocks, block_size / kPer};
    add_values(tiles, num_rows, own);
  }

  // Decodes are bound by reading the cache, whose blocks lie anywhere: no prefetcher of the CPU follows them, so values
  // are called for while scores are computed, and the next keys while values are summed up.
  static void prefetch(const char* const* blocks, int num_blocks, std::int64_t num_bytes) {
    for (int block = 0; block < num_blocks; ++block) {
      for (std::int64_t at = 0; at < num_bytes; at += 64) {
        _mm_prefetch(blocks[block] + at, _MM_HINT_T1);
      }
    }
  }

  void prefetch_next_keys(const AttentionTask& task, int first, int end) const {
    for (int key = first; key < std::min(end, first + kSpanKeys); key += shape_.block_size) {
      const char* block = head_of(layer_.keys, task, key / shape_.block_size);
      prefetch(&block, 1, shape_.head_bytes);
    }
  }

  void score(const char* const* key_tiles, int num_tiles, int num_rows, AttentionScratch<T>& own) const {
    const int head_dim = shape_.head_dim;
    const std::ptrdiff_t row_bytes = std::ptrdiff_t{head_dim} * sizeof(T);
    const Passes passes(num_rows);
    for (int row = 0, rows = 0; row < num_rows; row += rows) {
      rows = passes.rows(num_rows - row);
      for (int tile = 0, width = 0; tile < num_tiles; tile += width) {
        width = neighbours(key_tiles, tile, std::min(num_tiles, tile + passes.tiles));
        const std::ptrdiff_t stride = width > 1 ? key_tiles[tile + 1] - key_tiles[tile] : 0;
        const Tiles tiles{key_tiles + tile, stride, 1, head_dim / Numbers<T>::kPerLane};
        choose_pass<T, false>(rows, width)(reinterpret_cast<const char*>(own.queries) + row * row_bytes, row_bytes,
                                           tiles, own.scores + row * kSpanKeys + tile * kWidth, kSpanKeys);
      }
    }
  }

  // How many tiles from `tile` on lie equally far apart, as one pass takes them.
  static int neighbours(const char* const* tiles, int tile, int end) {
    int count = 1;
    while (tile + count < end &&
           (count == 1 || tiles[tile + count] - tiles[tile + count - 1] == tiles[tile + 1] - tiles[tile])) {
      ++count;
    }
    return count;
  }

  // Scores of a row to shares of the softmax so far; the query stands at `position` among the keys.
  void soften(int position, int first, int end, int num_keys, int row, AttentionScratch<T>& own) const {
    float* scores = own.scores + row * kSpanKeys;
    T* shares = own.shares + row * kSpanKeys;
    const int from = std::max(0, (rule_.window ? position - rule_.window + 1 : 0) - first);
    const int to = std::min(end, position + 1) - first;
    const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 most = nothing;
    for (int key = 0; key < num_keys; key += kWidth) {
      __m512 score = _mm512_mul_ps(_mm512_loadu_ps(scores + key), _mm512_set1_ps(rule_.scale));
      if (rule_.softcap != 0) {
        score = soft_capped(score, rule_.softcap);
      }
      score = _mm512_mask_mov_ps(nothing, seen(key, from, to), score);
      _mm512_storeu_ps(scores + key, score);
      most = _mm512_max_ps(most, score);
    }
    const float before = own.largest[row], largest = std::max(before, _mm512_reduce_max_ps(most));
    if (from >= to) {  // this query sees none of them
      std::memset(shares, 0, sizeof(T) * num_keys);
      return;
    }
    __m512 total = _mm512_setzero_ps();
    for (int key = 0; key < num_keys; key += kWidth) {
      const __m512 score = _mm512_sub_ps(_mm512_loadu_ps(scores + key), _mm512_set1_ps(largest));
      const __m512 share = _mm512_maskz_mov_ps(seen(key, from, to), exponential(score));
      total = _mm512_add_ps(total, share);
      Numbers<T>::store(shares + key, share);
    }
    const float shrink = std::exp(before - largest);
    own.total[row] = own.total[row] * shrink + _mm512_reduce_add_ps(total);
    own.largest[row] = largest;
    if (shrink != 1.0f) {
      float* sums = own.sums + row * shape_.head_dim;
      for (int d = 0; d < shape_.head_dim; d += kWidth) {
        _mm512_storeu_ps(sums + d, _mm512_mul_ps(_mm512_set1_ps(shrink), _mm512_loadu_ps(sums + d)));
      }
    }
  }

  // Which of the 16 keys from `key` on lie in `from` to `to`.
  static __mmask16 seen(int key, int from, int to) {
    const int low = std::clamp(from - key, 0, kWidth), high = std::clamp(to - key, 0, kWidth);
    return static_cast<__mmask16>(high > low ? ((1u << high) - 1) & ~((1u << low) - 1) : 0);
  }

  void add_values(const Tiles& all, int num_rows, AttentionScratch<T>& own) const {
    const int head_dim = shape_.head_dim, num_tiles = head_dim / kWidth;
    const std::ptrdiff_t row_bytes = std::ptrdiff_t{kSpanKeys} * sizeof(T);
    const Passes passes(num_rows);
    for (int tile = 0; tile < num_tiles; tile += passes.tiles) {
      const char* blocks[kSpanKeys / kWidth];
      for (int block = 0; block < all.num_segments; ++block) {
        blocks[block] = all.base[block] + tile * all.tile_stride;
      }
      const Tiles tiles{blocks, all.tile_stride, all.num_segments, all.lanes};
      const int width = std::min(passes.tiles, num_tiles - tile);
      for (int row = 0, rows = 0; row < num_rows; row += rows) {
        rows = passes.rows(num_rows - row);
        choose_pass<T, true>(rows, width)(reinterpret_cast<const char*>(own.shares) + row * row_bytes, row_bytes,
                                          tiles, own.sums + row * head_dim + tile * kWidth, head_dim);
      }
    }
  }

  const CacheShape shape_;
  const CacheLayer layer_;
  const GroupTables tables_;
  const AttentionRule rule_;
  const int num_heads_;
  const int group_;
};

}  // namespace stallfree
