// The forward pass of a decoder over one flat hybrid batch, and the draws after it, for CPUs with AVX-512 (and its bfloat16
// instructions, for weights in that format). Called from Python through the functions at the end;
// `stallfree_worker.model.cpu.library` has the same structures, and Python owns all memory that is pointed to here.
//
// All threads walk through the pass together, a stage after the other: products with a matrix, some rows, or attention.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention.h"
#include "draw.h"
#include "likeliest.h"
#include "matmul.h"
#include "numbers.h"
#include "team.h"

namespace stallfree {

enum Activation : std::int32_t { kSilu = 0, kGeluTanh = 1 };

extern "C" {

struct StallfreeMatrix {
  const char* tiles;
  const float* bias;    // or null
  const float* scales;  // or null: weights are in the format of activations
  std::int32_t num_outputs;
  std::int32_t num_inputs;
};

// The output layer's matrix in 8 bits. All null where there is none.
struct StallfreeSketch {
  char* tiles;
  float* scales;
  float* per_input;  // see `Sketch`
  float* per_error;
};

struct StallfreeLayer {
  StallfreeMatrix qkv;
  StallfreeMatrix output;
  StallfreeMatrix gate_up;  // tiles of both by turns
  StallfreeMatrix down;
  const float* input_norm;
  const float* qk_norm;              // [num_heads + num_kv_heads, head_dim], or null
  const float* attention_post_norm;  // or null
  const float* mlp_norm;
  const float* mlp_post_norm;  // or null
  char* keys;
  char* values;
  std::int32_t group;
  std::int32_t rope;
  std::int32_t window;  // 0: none
  std::int32_t padding;
};

struct StallfreeDecoder {
  const StallfreeLayer* layers;
  StallfreeMatrix head;
  StallfreeSketch sketch;
  const float* final_norm;
  const char* embedding;             // [vocab_size, hidden_size]
  const float* inverse_frequencies;  // [num_ropes, head_dim / 2]: radians per position
  const float* rope_factors;         // [num_ropes]: cosines and sines are multiplied with it
  std::int32_t is_bfloat16;
  std::int32_t num_layers;
  std::int32_t num_ropes;
  std::int32_t hidden_size;
  std::int32_t intermediate_size;
  std::int32_t num_heads;
  std::int32_t num_kv_heads;
  std::int32_t head_dim;
  std::int32_t block_size;
  std::int32_t activation;
  float norm_eps;
  float attention_scale;
  float attention_softcap;  // 0: none
  float logit_softcap;      // 0: none
  float embedding_scale;
};

struct StallfreeBatch {
  const std::int64_t* token_ids;     // [num_tokens]
  const std::int32_t* cu_seqlens_q;  // [num_sequences + 1]
  const std::int32_t* num_computed;  // [num_sequences]: tokens of the text before these
  const std::int32_t* num_shared;    // [num_sequences]: so many of the text stand in the cache and are not written again
  const std::int64_t* wanted_rows;   // [num_wanted], rising: the rows whose output anybody wants
  const BlockTable* tables;          // [num_sequences, num_groups]
  std::int32_t num_tokens;
  std::int32_t num_sequences;
  std::int32_t num_wanted;
  std::int32_t num_groups;
};

}  // extern "C"

namespace {

Matrix matrix_of(const StallfreeMatrix& matrix) {
  return {matrix.tiles,       matrix.bias, matrix.scales, matrix.num_outputs, (matrix.num_outputs + kWidth - 1) / kWidth,
          matrix.num_inputs};
}

// x * weight / rms(x), where x is `size` floats.
template <class Store>
void norm_row(const float* x, const float* weight, int size, float eps, Store&& store) {
  __m512 squares = _mm512_setzero_ps();
  for (int i = 0; i < size; i += kWidth) {
    const __m512 value = _mm512_loadu_ps(x + i);
    squares = _mm512_fmadd_ps(value, value, squares);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / size + eps));
  for (int i = 0; i < size; i += kWidth) {
    store(i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), scale), _mm512_loadu_ps(weight + i)));
  }
}

// The same, rounded for the next product.
template <class T>
void norm_row_to(T* to, const float* x, const float* weight, int size, float eps) {
  norm_row(x, weight, size, eps, [to](int i, __m512 values) { Numbers<T>::store(to + i, values); });
}

// So many items of scratch memory, from a cache line's begin on.
template <class Item>
Item* take(char*& scratch, std::int64_t count) {
  scratch = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(scratch) + 63) & ~std::uintptr_t{63});
  Item* items = reinterpret_cast<Item*>(scratch);
  scratch += count * std::int64_t{sizeof(Item)};
  return items;
}

template <class T>
class ForwardPass {
 public:
  // `hidden`, [num_tokens, hidden_size], is the residual stream, and in the rows that are wanted the result.
  ForwardPass(const StallfreeDecoder& decoder, const StallfreeBatch& batch, float* hidden, char* scratch, int num_threads)
      : decoder_(decoder),
        batch_(batch),
        hidden_(hidden),
        num_qkv_((decoder.num_heads + 2 * decoder.num_kv_heads) * decoder.head_dim),
        num_q_(decoder.num_heads * decoder.head_dim),
        num_angles_(decoder.num_ropes * decoder.head_dim / 2),
        shape_{decoder.block_size, decoder.num_kv_heads, decoder.head_dim,
               std::int64_t{decoder.block_size} * decoder.head_dim * std::int64_t{sizeof(T)},
               std::int64_t{decoder.block_size} * decoder.head_dim * decoder.num_kv_heads * std::int64_t{sizeof(T)}} {
    const std::int64_t num_tokens = batch.num_tokens;
    cosines_ = take<float>(scratch, num_tokens * num_angles_);
    sines_ = take<float>(scratch, num_tokens * num_angles_);
    normed_ = take<T>(scratch, num_tokens * decoder.hidden_size);
    projected_ = take<float>(scratch, num_tokens * num_qkv_);
    queries_ = take<T>(scratch, num_tokens * num_q_);
    attended_ = take<T>(scratch, num_tokens * num_q_);
    update_ = take<float>(scratch, num_tokens * decoder.hidden_size);
    active_ = take<T>(scratch, num_tokens * decoder.intermediate_size);
    integers_ = take<char>(scratch, num_tokens * widest_integer_row(decoder));
    attention_scratch_ = take<AttentionScratch<T>>(scratch, num_threads);
    for (int sequence = 0; sequence < batch.num_sequences; ++sequence) {
      for (int query = 0; query < num_queries_of(sequence); ++query) {
        sequence_of_row_.push_back(sequence);
        position_of_row_.push_back(batch.num_computed[sequence] + query);
      }
      ends_.push_back(batch.num_computed[sequence] + num_queries_of(sequence));
    }
    find_fresh_blocks();
    const auto all = [&](int sequence) { return Range{0, num_queries_of(sequence)}; };
    const auto wanted = [&](int sequence) { return wanted_queries(sequence); };
    all_rows_ = {nullptr, batch.num_tokens, plan_attention(all)};
    if (batch.num_wanted < batch.num_tokens) {
      wanted_rows_ = {batch.wanted_rows, batch.num_wanted, plan_attention(wanted)};
    }
  }

  // Bytes of scratch memory that a pass over these many tokens needs.
  static std::int64_t scratch_bytes(const StallfreeDecoder& decoder, std::int64_t num_tokens, int num_threads) {
    const std::int64_t q = std::int64_t{decoder.num_heads} * decoder.head_dim;
    const std::int64_t qkv = q + std::int64_t{2} * decoder.num_kv_heads * decoder.head_dim;
    const std::int64_t per_token = sizeof(T) * (decoder.hidden_size + 2 * q + decoder.intermediate_size) +
                                   sizeof(float) * (decoder.num_ropes * decoder.head_dim + qkv + decoder.hidden_size) +
                                   widest_integer_row(decoder);
    return num_tokens * per_token + std::int64_t{sizeof(AttentionScratch<T>)} * num_threads + 11 * 64;
  }

  int most_stages() const { return 1 + kMostLayerStages * decoder_.num_layers; }

  void run(Member& member) {
    const int num_fresh = static_cast<int>(fresh_blocks_.size());
    member.share_small(num_fresh + batch_.num_tokens, [&](int number) {
      if (number < num_fresh) {
        clear(fresh_blocks_[number]);
        return;
      }
      const int row = number - num_fresh;
      find_angles(row);
      embed(row);
      norm(row, row, decoder_.layers[0].input_norm);
    });
    const Rows& rows_of_last = batch_.num_wanted < batch_.num_tokens ? wanted_rows_ : all_rows_;
    for (int number = 0; number < decoder_.num_layers; ++number) {
      const bool is_last = number + 1 == decoder_.num_layers;
      run_layer(member, decoder_.layers[number], is_last ? rows_of_last : all_rows_,
                is_last ? nullptr : decoder_.layers[number + 1].input_norm);
    }
  }

 private:
  // What of the batch a layer is computed for, and its attention.
  struct Rows {
    const std::int64_t* rows;  // [count], or null: all of the batch
    int count;
    std::vector<AttentionTask> tasks;

    std::int64_t row(int place) const { return rows == nullptr ? place : rows[place]; }
  };

  static std::int64_t widest_integer_row(const StallfreeDecoder& decoder) {
    const int most = std::max({decoder.hidden_size, decoder.intermediate_size, decoder.num_heads * decoder.head_dim});
    return integer_row_bytes(most / 4);
  }

  // For some queries of each sequence.
  template <class QueriesOf>
  std::vector<AttentionTask> plan_attention(QueriesOf&& queries_of) const {
    std::vector<AttentionTask> tasks;
    const int most_queries = std::max(1, kTileRows / (decoder_.num_heads / decoder_.num_kv_heads));
    // chunks, which come last, and of each its last queries take longest
    for (int sequence = batch_.num_sequences - 1; sequence >= 0; --sequence) {
      const Range queries = queries_of(sequence);
      for (int end = queries.end; end > queries.begin; end -= most_queries) {
        for (int head = 0; head < decoder_.num_kv_heads; ++head) {
          tasks.push_back({sequence, head, std::max(queries.begin, end - most_queries), end});
        }
      }
    }
    return tasks;
  }

  GroupTables tables_of(int group) const {
    return {batch_.tables + group, batch_.num_groups, ends_.data(), shape_.block_size};
  }

  // What attention reads of a block must be finite, so those that a sequence begins and does not fill are cleared.
  void find_fresh_blocks() {
    for (int group = 0; group < batch_.num_groups; ++group) {
      const GroupTables tables = tables_of(group);
      for (int sequence = 0; sequence < batch_.num_sequences; ++sequence) {
        const int num_last = tables.length(sequence) % shape_.block_size;
        if (0 < num_last && num_last <= num_queries_of(sequence)) {
          fresh_blocks_.push_back({group, tables.of(sequence).blocks[tables.length(sequence) / shape_.block_size]});
        }
      }
    }
  }

  struct FreshBlock {
    int group;
    std::int64_t block;
  };

  void clear(const FreshBlock& fresh) const {
    for (int number = 0; number < decoder_.num_layers; ++number) {
      const StallfreeLayer& layer = decoder_.layers[number];
      if (layer.group == fresh.group) {
        std::memset(layer.keys + fresh.block * shape_.block_bytes, 0, shape_.block_bytes);
        std::memset(layer.values + fresh.block * shape_.block_bytes, 0, shape_.block_bytes);
      }
    }
  }

  // From the first that is wanted to the last.
  Range wanted_queries(int sequence) const {
    const std::int64_t begin = batch_.cu_seqlens_q[sequence], end = batch_.cu_seqlens_q[sequence + 1];
    const std::int64_t* all = batch_.wanted_rows;
    const std::int64_t* first = std::lower_bound(all, all + batch_.num_wanted, begin);
    const std::int64_t* behind = std::lower_bound(first, all + batch_.num_wanted, end);
    return first == behind ? Range{0, 0} : Range{static_cast<int>(*first - begin), static_cast<int>(behind[-1] + 1 - begin)};
  }

  int num_queries_of(int sequence) const {
    return batch_.cu_seqlens_q[sequence + 1] - batch_.cu_seqlens_q[sequence];
  }

  // Of all ropes, as far as a row is turned by them.
  void find_angles(int row) {
    const __m256 position = _mm256_set1_ps(static_cast<float>(position_of_row_[row]));
    for (int rope = 0, half = decoder_.head_dim / 2; rope < decoder_.num_ropes; ++rope) {
      const __m256 factor = _mm256_set1_ps(decoder_.rope_factors[rope]);
      for (int i = rope * half; i < (rope + 1) * half; i += 8) {
        __m256 sine, cosine;
        sine_and_cosine(_mm256_mul_ps(position, _mm256_loadu_ps(decoder_.inverse_frequencies + i)), &sine, &cosine);
        _mm256_storeu_ps(sines_ + std::int64_t{row} * num_angles_ + i, _mm256_mul_ps(sine, factor));
        _mm256_storeu_ps(cosines_ + std::int64_t{row} * num_angles_ + i, _mm256_mul_ps(cosine, factor));
      }
    }
  }

  float* hidden_row(std::int64_t row) const { return hidden_ + row * decoder_.hidden_size; }

  void embed(int row) {
    const int size = decoder_.hidden_size;
    const __m512 scale = _mm512_set1_ps(decoder_.embedding_scale);
    const T* from = reinterpret_cast<const T*>(decoder_.embedding) + batch_.token_ids[row] * size;
    for (int i = 0; i < size; i += kWidth) {
      _mm512_storeu_ps(hidden_row(row) + i, _mm512_mul_ps(scale, Numbers<T>::load(from + i)));
    }
  }

  // A row of the residual stream, for the next product.
  void norm(int place, std::int64_t row, const float* weight) {
    const int size = decoder_.hidden_size;
    norm_row_to(normed_ + std::int64_t{place} * size, hidden_row(row), weight, size, decoder_.norm_eps);
  }

  // Adds what a block of the layer gave to a row of the residual stream.
  void add_update(int place, std::int64_t row, const float* post_norm) {
    const int size = decoder_.hidden_size;
    const float* update = update_ + std::int64_t{place} * size;
    const auto add = [hidden = hidden_row(row)](int i, __m512 values) {
      _mm512_storeu_ps(hidden + i, _mm512_add_ps(_mm512_loadu_ps(hidden + i), values));
    };
    if (post_norm != nullptr) {
      norm_row(update, post_norm, size, decoder_.norm_eps, add);
    } else {
      for (int i = 0; i < size; i += kWidth) {
        add(i, _mm512_loadu_ps(update + i));
      }
    }
  }

  // Eight, one more for each matrix of integers, and one where rows are brought together.
  static constexpr int kMostLayerStages = 13;

  // Keys and values of all rows, and what follows from them for `rows`, whose intermediate results lie side by side.
  void run_layer(Member& member, const StallfreeLayer& layer, const Rows& rows, const float* next_norm) {
    project(member, normed_, batch_.num_tokens, layer.qkv, projected_);
    member.share_small(batch_.num_tokens, [&](int row) { place_heads(row, layer); });
    if (rows.count == 0) {
      return;
    }
    attend(member, layer, rows.tasks);
    if (rows.rows != nullptr) {
      member.share(1, [&](int) { bring_together(rows); });
    }
    project(member, attended_, rows.count, layer.output, update_);
    member.share_small(rows.count, [&](int place) {
      add_update(place, rows.row(place), layer.attention_post_norm);
      norm(place, rows.row(place), layer.mlp_norm);
    });
    activate(member, rows.count, layer.gate_up);
    project(member, active_, rows.count, layer.down, update_);
    member.share_small(rows.count, [&](int place) {
      add_update(place, rows.row(place), layer.mlp_post_norm);
      if (next_norm != nullptr) {
        norm(place, rows.row(place), next_norm);
      }
    });
  }

  // Rows rise, so none is written over before it is read.
  void bring_together(const Rows& rows) {
    for (int place = 0; place < rows.count; ++place) {
      std::memmove(attended_ + std::int64_t{place} * num_q_, attended_ + rows.row(place) * num_q_, num_q_ * sizeof(T));
    }
  }

  void project(Member& member, const T* x, int num_rows, const StallfreeMatrix& weights, float* out) {
    const Matrix matrix = matrix_of(weights);
    multiply<T>(member, x, num_rows, matrix, 1, integers_,
                [&](int row, int rows, int tile, int num_tiles, const float* sums) {
                  store_sums(matrix, row, rows, tile, num_tiles, sums, out);
                });
  }

  static void store_sums(const Matrix& matrix, int row, int rows, int tile, int num_tiles, const float* sums,
                         float* out) {
    for (int r = 0; r < rows; ++r) {
      float* to = out + std::int64_t{row + r} * matrix.num_outputs + tile * kWidth;
      for (int t = 0; t < num_tiles; ++t) {
        __m512 value = _mm512_load_ps(sums + r * kPassStride + t * kWidth);
        if (matrix.bias != nullptr) {
          value = _mm512_add_ps(value, _mm512_loadu_ps(matrix.bias + (tile + t) * kWidth));
        }
        _mm512_storeu_ps(to + t * kWidth, value);
      }
    }
  }

  // Rotates a row's queries and keys, and puts keys and values where they belong.
  void place_heads(int row, const StallfreeLayer& layer) {
    const int dim = decoder_.head_dim, half = dim / 2;
    const int num_heads = decoder_.num_heads, num_rotated = num_heads + decoder_.num_kv_heads;
    const GroupTables tables = tables_of(layer.group);
    alignas(64) float turned[kMostHeadDim];
    float* heads = projected_ + std::int64_t{row} * num_qkv_;
    const float* cosine = cosines_ + std::int64_t{row} * num_angles_ + layer.rope * half;
    const float* sine = sines_ + std::int64_t{row} * num_angles_ + layer.rope * half;
    const int sequence = sequence_of_row_[row];
    const bool is_shared = position_of_row_[row] < batch_.num_shared[sequence];
    const std::int64_t place = position_of_row_[row] - tables.start(sequence);
    const std::int64_t block = tables.of(sequence).blocks[place / shape_.block_size];
    const int slot = static_cast<int>(place % shape_.block_size);
    for (int head = 0; head < num_rotated; ++head) {
      float* values = heads + head * dim;
      if (layer.qk_norm != nullptr) {
        norm_row(values, layer.qk_norm + head * dim, dim, decoder_.norm_eps,
                 [values](int i, __m512 normed) { _mm512_storeu_ps(values + i, normed); });
      }
      for (int i = 0; i < half; ++i) {
        turned[i] = values[i] * cosine[i] - values[i + half] * sine[i];
        turned[i + half] = values[i + half] * cosine[i] + values[i] * sine[i];
      }
      if (head < num_heads) {
        T* to = queries_ + std::int64_t{row} * num_q_ + head * dim;
        for (int i = 0; i < dim; i += kWidth) {
          Numbers<T>::store(to + i, _mm512_load_ps(turned + i));
        }
      } else if (!is_shared) {
        write_key<T>(head_at(layer.keys, block, head - num_heads), turned, slot, dim);
      }
    }
    for (int head = 0; head < decoder_.num_kv_heads && !is_shared; ++head) {
      write_value<T>(head_at(layer.values, block, head), heads + (num_rotated + head) * dim, slot, dim,
                     shape_.block_size);
    }
  }

  char* head_at(char* cache, std::int64_t block, int head) const {
    return cache + block * shape_.block_bytes + head * shape_.head_bytes;
  }

  void attend(Member& member, const StallfreeLayer& layer, const std::vector<AttentionTask>& tasks) {
    const AttentionRule rule{decoder_.attention_scale, decoder_.attention_softcap, layer.window};
    const Attention<T> attention(shape_, {layer.keys, layer.values}, tables_of(layer.group), rule,
                                 decoder_.num_heads);
    member.share_one_by_one(static_cast<int>(tasks.size()), [&](int number) {
      const AttentionTask& task = tasks[number];
      attention.compute(task, queries_, attended_, batch_.cu_seqlens_q[task.sequence], num_queries_of(task.sequence),
                        attention_scratch_[member.index]);
    });
  }

  void activate(Member& member, int num_rows, const StallfreeMatrix& weights) {
    const Matrix matrix = matrix_of(weights);
    multiply<T>(member, normed_, num_rows, matrix, 2, integers_,
                [&](int row, int rows, int tile, int num_tiles, const float* sums) {
                  for (int r = 0; r < rows; ++r) {
                    T* to = active_ + std::int64_t{row + r} * decoder_.intermediate_size;
                    for (int t = 0; t < num_tiles; t += 2) {
                      __m512 gate = _mm512_load_ps(sums + r * kPassStride + t * kWidth);
                      __m512 up = _mm512_load_ps(sums + r * kPassStride + (t + 1) * kWidth);
                      if (matrix.bias != nullptr) {
                        gate = _mm512_add_ps(gate, _mm512_loadu_ps(matrix.bias + (tile + t) * kWidth));
                        up = _mm512_add_ps(up, _mm512_loadu_ps(matrix.bias + (tile + t + 1) * kWidth));
                      }
                      Numbers<T>::store(to + (tile + t) / 2 * kWidth, _mm512_mul_ps(active(gate), up));
                    }
                  }
                });
  }

  __m512 active(__m512 x) const {
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 inner = x;  // of the logistic function that both multiply x with
    if (decoder_.activation == kGeluTanh) {
      const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
      inner = _mm512_mul_ps(_mm512_set1_ps(1.5957691216057308f),
                            _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, x));
    }
    const __m512 power = exponential(_mm512_sub_ps(_mm512_setzero_ps(), inner));
    return _mm512_div_ps(x, _mm512_add_ps(one, power));
  }

  const StallfreeDecoder& decoder_;
  const StallfreeBatch& batch_;
  float* const hidden_;
  const int num_qkv_;
  const int num_q_;
  const int num_angles_;
  const CacheShape shape_;
  float* cosines_;  // [num_tokens, num_ropes, head_dim / 2]
  float* sines_;
  T* normed_;
  float* projected_;
  T* queries_;
  T* attended_;
  float* update_;
  T* active_;
  char* integers_;
  AttentionScratch<T>* attention_scratch_;
  std::vector<int> sequence_of_row_;
  std::vector<std::int32_t> position_of_row_;
  std::vector<std::int32_t> ends_;  // of each sequence, in its text
  std::vector<FreshBlock> fresh_blocks_;
  Rows all_rows_;
  Rows wanted_rows_;  // where these are fewer
};

template <class T>
void forward(const StallfreeDecoder& decoder, const StallfreeBatch& batch, float* hidden, char* scratch,
             int num_threads) {
  ForwardPass<T> pass(decoder, batch, hidden, scratch, num_threads);
  run_together(num_threads, pass.most_stages(), [&](Member& member) { pass.run(member); });
}

// How many ids of a row the output layer tells one maximum for: it finds it while it has them in its registers.
int ids_per_maximum(int num_rows) { return Passes(num_rows).tiles * kWidth; }

// The output layer for some rows of `hidden`, and the maxima of each.
template <class T>
void head(const StallfreeDecoder& decoder, const float* hidden, const std::int64_t* rows, int num_rows, float* logits,
          float* maxima, char* scratch, int num_threads) {
  const int size = decoder.hidden_size;
  T* normed = take<T>(scratch, std::int64_t{num_rows} * size);
  char* integers = take<char>(scratch, num_rows * integer_row_bytes(size / 4));
  const Matrix matrix = matrix_of(decoder.head);
  const int tiles_per_maximum = ids_per_maximum(num_rows) / kWidth;
  const int num_maxima = (matrix.num_tiles + tiles_per_maximum - 1) / tiles_per_maximum;
  run_together(num_threads, 3, [&](Member& member) {
    member.share(num_rows, [&](int row) {
      norm_row_to(normed + std::int64_t{row} * size, hidden + rows[row] * size, decoder.final_norm, size,
                  decoder.norm_eps);
    });
    multiply<T>(member, normed, num_rows, matrix, tiles_per_maximum, integers,
                [&](int row, int count, int tile, int num_tiles, const float* sums) {
                  for (int r = 0; r < count; ++r) {
                    float* to = logits + std::int64_t{row + r} * matrix.num_outputs;
                    SoundLargest most;
                    for (int t = 0; t < num_tiles; ++t) {
                      const int column = (tile + t) * kWidth;
                      const __mmask16 lanes = lanes_of(column, matrix.num_outputs);
                      __m512 value = _mm512_load_ps(sums + r * kPassStride + t * kWidth);
                      if (decoder.logit_softcap != 0) {
                        value = soft_capped(value, decoder.logit_softcap);
                      }
                      _mm512_mask_storeu_ps(to + column, lanes, value);
                      most.add(_mm512_mask_mov_ps(_mm512_set1_ps(kNever), lanes, value));
                    }
                    maxima[std::int64_t{row + r} * num_maxima + tile / tiles_per_maximum] = most.value();
                  }
                });
  });
}

// The likeliest ids of some rows of `hidden`, by the sketch of the output layer.
template <class T>
void find_likeliest(const StallfreeDecoder& decoder, const float* hidden, const std::int64_t* rows, int num_rows,
                    const void* const* allowed, std::int64_t* tokens, float* bounds, char* scratch, int num_threads) {
  const int size = decoder.hidden_size;
  const Matrix matrix = matrix_of(decoder.head);
  Matrix rounded = matrix;
  rounded.tiles = decoder.sketch.tiles;
  rounded.scales = decoder.sketch.scales;
  const Sketch sketch{rounded, decoder.sketch.per_input, decoder.sketch.per_error};
  const std::ptrdiff_t stride = integer_row_bytes(size / 4);
  T* normed = take<T>(scratch, std::int64_t{num_rows} * size);
  char* integers = take<char>(scratch, num_rows * stride);
  Sizes* sizes = take<Sizes>(scratch, num_rows);
  run_together(num_threads, 3, [&](Member& member) {
    member.share(num_rows, [&](int row) {
      T* own = normed + std::int64_t{row} * size;
      norm_row_to(own, hidden + rows[row] * size, decoder.final_norm, size, decoder.norm_eps);
      quantize_row(own, size, integers + row * stride);
      sizes[row] = sizes_of(own, size, integers + row * stride);
    });
    bound_logits(member, integers, num_rows, sketch, sizes, bounds);
    member.share_one_by_one(num_rows, [&](int row) {
      Search<T> search(normed + std::int64_t{row} * size, matrix, static_cast<const char*>(allowed[row]));
      tokens[row] = search.run(bounds + std::int64_t{row} * matrix.num_tiles);
    });
  });
}

}  // namespace

extern "C" {

// One more whenever what is called here, the structures, or how Python lays out weights is no longer the same.
int stallfree_interface() { return 5; }

// Of the structures, in the order in which Python names them: it must mean the same.
int stallfree_struct_bytes(int number) {
  constexpr int kBytes[] = {sizeof(StallfreeMatrix),  sizeof(StallfreeSketch), sizeof(StallfreeLayer),
                            sizeof(StallfreeDecoder), sizeof(StallfreeBatch)};
  return kBytes[number];
}

std::int64_t stallfree_scratch_bytes(const StallfreeDecoder* decoder, std::int64_t num_tokens, int num_threads) {
  return decoder->is_bfloat16 ? ForwardPass<Bf16>::scratch_bytes(*decoder, num_tokens, num_threads)
                              : ForwardPass<float>::scratch_bytes(*decoder, num_tokens, num_threads);
}

void stallfree_forward(const StallfreeDecoder* decoder, const StallfreeBatch* batch, float* hidden, char* scratch,
                       int num_threads) {
  const auto run = decoder->is_bfloat16 ? forward<Bf16> : forward<float>;
  run(*decoder, *batch, hidden, scratch, num_threads);
}

// The most maxima that `stallfree_logits` may tell of a row, whatever number of rows there are.
int stallfree_most_maxima(int num_ids) {
  constexpr int kLeastIds = std::min(Passes(1).tiles, Passes(kMostRows).tiles) * kWidth;
  return (num_ids + kLeastIds - 1) / kLeastIds;
}

// One token of each row [num_ids] of logits, by its temperature (0: the likeliest) and a share in [0, 1) that is drawn
// evenly, among the ids whose bit is set, where there are bits; -1 where the row has NaN or +inf, or nothing but -inf in
// what is allowed. `maxima` are those that came with these logits, or null.
void stallfree_draw(const float* logits, const float* maxima, int num_rows, int num_ids, const float* temperatures,
                    const double* shares, const void* const* allowed, std::int64_t* tokens, int num_threads) {
  const int ids_per = maxima == nullptr ? 1 : ids_per_maximum(num_rows);
  const int num_maxima = (num_ids + ids_per - 1) / ids_per;
  // Idle members cost less than another number of threads, for which OpenMP would end some and start them anew.
  run_together(num_rows == 1 ? 1 : num_threads, 1, [&](Member& member) {
    member.share(num_rows, [&](int row) {
      const Logits own{logits + std::int64_t{row} * num_ids, num_ids, static_cast<const char*>(allowed[row])};
      const float* own_maxima = maxima == nullptr ? own.values : maxima + std::int64_t{row} * num_maxima;
      tokens[row] = draw(own, own_maxima, ids_per, temperatures[row], shares[row]);
    });
  });
}

// Reads `num_bytes`, a multiple of 64 and less than 2^37, as fast as this machine can, and does nothing with them but this
// sum: what a step that must read as many bytes cannot be faster than.
std::int64_t stallfree_read(const char* memory, std::int64_t num_bytes, int num_threads) {
  constexpr int kLine = 64, kAhead = 32;
  std::atomic<std::int64_t> sum{0};
  run_together(num_threads, 0, [&](Member& member) {
    const Range lines = part_of(static_cast<int>(num_bytes / kLine), member.index, member.num_threads);
    __m512i total = _mm512_setzero_si512();
    for (std::int64_t line = lines.begin; line < lines.end; ++line) {
      _mm_prefetch(memory + (line + kAhead) * kLine, _MM_HINT_T0);
      total = _mm512_add_epi64(total, _mm512_loadu_si512(memory + line * kLine));
    }
    sum += _mm512_reduce_add_epi64(total);
  });
  return sum;
}

void stallfree_logits(const StallfreeDecoder* decoder, const float* hidden, const std::int64_t* rows, int num_rows,
                      float* logits, float* maxima, char* scratch, int num_threads) {
  const auto run = decoder->is_bfloat16 ? head<Bf16> : head<float>;
  run(*decoder, hidden, rows, num_rows, logits, maxima, scratch, num_threads);
}

// Makes the sketch of a matrix of bfloat16, whose memory is there.
void stallfree_make_sketch(const StallfreeMatrix* matrix, const StallfreeSketch* sketch, int num_threads) {
  const Matrix full = matrix_of(*matrix);
  const std::ptrdiff_t tile_bytes = std::ptrdiff_t{full.num_inputs} * kWidth;  // in 8 bits
  run_together(num_threads, 1, [&](Member& member) {
    member.share(full.num_tiles, [&](int tile) {
      const int first = tile * kWidth;
      sketch_tile(full.tiles + tile * tile_bytes * std::int64_t{sizeof(Bf16)}, full.num_inputs,
                  sketch->tiles + tile * tile_bytes, sketch->scales + first, sketch->per_input + first,
                  sketch->per_error + first);
    });
  });
}

// The likeliest id of each row, as `stallfree_draw` finds it in the row's logits, with the help of the decoder's sketch: it
// must have one, and no soft cap. `bounds` is memory, [num_rows, num_tiles]. -1 too where only the logits can tell.
void stallfree_find_likeliest(const StallfreeDecoder* decoder, const float* hidden, const std::int64_t* rows, int num_rows,
                              const void* const* allowed, std::int64_t* tokens, float* bounds, char* scratch,
                              int num_threads) {
  find_likeliest<Bf16>(*decoder, hidden, rows, num_rows, allowed, tokens, bounds, scratch, num_threads);
}

}  // extern "C"

}  // namespace stallfree
