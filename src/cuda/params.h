// What a kernel is told: pointers, strides and options, as plain data passed by value. All strides count elements.
#pragma once
#include <cstdint>

#include "core/dropout.h"
#include "core/host_device.h"

namespace tilewise::cuda {

// An int32 vector in device memory; absent if data is null.
struct IndexVector {
  const int32_t* data = nullptr;
  int64_t stride = 0;
  TW_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  TW_HOST_DEVICE int32_t at(int64_t n) const { return data[n * stride]; }
};

// A tensor of rows [batch, row, head, column], last stride 1. Packed tensors have batch = 0, paged ones pages there.
struct RowTensor {
  void* data = nullptr;
  int64_t batch = 0, row = 0, head = 0;
};

// lse, dlse, delta: one float per row and head.
struct RowScalar {
  float* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
  TW_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

// Who lies where: core/sequence.h with the index vectors in device memory.
struct SequenceParams {
  int32_t batch, seqlen_q, seqlen_k, seqlen_new;  // seqlen_new: keys appended before this kernel runs
  int32_t num_heads_q, num_heads_k;
  int64_t total_q, total_k;  // packed
  bool packed_q, packed_k;
  int32_t page_size;  // 0 = not paged
  IndexVector cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, cache_batch_idx, leftpad_k;
  const int32_t* page_table;
  int64_t page_table_batch, page_table_page;
};

// What happens to a score between q . k and the softmax.
struct ScoreParams {
  float scale;       // softmax_scale
  float scale_log2;  // softmax_scale * log2(e)
  float softcap;     // 0 = off
  int32_t window_left, window_right;  // -1 = unbounded; causal: right = 0
  const void* bias;                   // broadcast dimensions have stride 0
  int32_t bias_dtype;                 // tw_dtype; TW_BOOL: a mask. Without a bias, not that
  int64_t bias_batch, bias_head, bias_row, bias_key;
  const float* alibi;
  int64_t alibi_batch, alibi_head;
  const float* sink;
  int64_t sink_head;
  Dropout dropout;
  const int64_t* rng_state;  // {seed, offset} in device memory, instead of dropout.seed and .offset
  int64_t rng_stride;
};

inline constexpr int kMaxSplits = 128;  // combine_kernel keeps a weight of each

struct ForwardParams {
  SequenceParams sequence;
  ScoreParams score;
  RowTensor q, k, v, o;
  bool o_is_float;  // o in float32, q in 16 bits
  bool aligned;     // q, k, v: rows of whole 16-byte chunks at multiples of 16 bytes: the fast copies work
  bool o_aligned;   // o likewise, and of q's type
  bool bias_in_tiles;  // there is shared memory for tiles of the bias, and 16-byte copies of its rows work
  int32_t head_dim, head_dim_v;
  RowScalar lse;
  float* max_logit;  // [batch, head], holds -inf when the kernel starts
  int64_t max_logit_batch, max_logit_head;
  int32_t pack;        // query heads of one key head that share a tile: row r is query r / pack, head r % pack of them
  int32_t num_blocks;  // row blocks of the longest sequence
  int32_t section;     // heads whose row blocks take turns, see heads_together()
  int32_t num_splits;  // > 1: o and lse go to the workspace, split by split
  float* split_o;      // [split, row of (batch, head, query), split_columns]
  int32_t split_columns;  // head_dim_v, rounded up to a multiple of 8
  float* split_lse;    // [split, row]
};

struct AppendParams {
  SequenceParams sequence;
  RowTensor k, v, k_new, v_new;  // k_new.data null: only queries to rotate
  RowTensor q, q_rotated;
  const void *cosines, *sines;
  int64_t cos_position, cos_pair, sin_position, sin_pair;
  bool table_is_float;
  IndexVector rotary_seqlens;
  int32_t rotary_dim;  // 0 = off
  bool interleaved;
  bool queries_advance;  // query i stands at base + i: with a causal mask or a window
  int32_t head_dim, head_dim_v;
};

// The backward pass keeps lse, delta and the float32 sum of dq in workspace arrays in which every sequence starts at a
// multiple of kRowPadding rows, so that the main kernel copies whole tiles of them without a bound.
inline constexpr int kRowPadding = 128;

// The sum of dbias, like the bias but contiguous. Many blocks add to an element in no fixed order, and still it has the same
// bits every time: the terms are rounded to multiples of 2^-exponent() and summed as integers, of 64 bits, which cannot
// overflow: what a row of queries adds is at most d |dO| |V| + |delta| with the largest of each, as its P sums to 1, and
// `log2_terms` bounds the number of rows.
struct DbiasSum {
  int64_t* sum;         // null: not asked for
  uint32_t* not_finite;  // one bit an element: a term was inf or NaN
  uint32_t* largest;     // bits of the largest finite |dO|, |delta| and |V|: floats >= 0 are ordered like their bits
  int64_t batch, head, row, key;  // strides
  int32_t log2_terms;
  float dropout_scale;
};

// Products of masked pairs carried inf or NaN: the main pass is needed again, from kernels that look for such rows.
struct RunAgain {
  int32_t wanted;
  uint32_t ticket;  // of the tasks of that run,
  int32_t cleared;  // and how many of those that clear are done
};

struct BackwardParams {
  SequenceParams sequence;
  ScoreParams score;
  RowTensor q, k, v, o, dout, dq, dk, dv;  // data null: gradient not asked for
  bool o_is_float, dq_is_float, dk_is_float, dv_is_float;  // in float32, q in 16 bits
  bool aligned;      // q, k, v, dout: the fast copies work
  bool o_aligned;    // o: 16-byte loads work
  bool dq_aligned;   // dq: 16-byte stores work, and it is of q's type
  int32_t head_dim, head_dim_v, head_dim_rounded;
  RowScalar lse, dlse;
  int64_t padded_rows;  // per head, all sequences
  float* lse_log2;      // [head, padded row]: lse * log2(e); +inf for a row that sees no key or does not exist
  float* delta;         // [head, padded row]: delta_scale * (rowsum(dout * o) - dlse)
  // The kernel for dropout leaves 1 / (1 - p) out of dS = P * (dP - delta): it is in the factor of dq and dk, and delta has 1 - p.
  float delta_scale, gradient_scale;
  float* dq_sum;        // [head, padded row / 16, column / 8, lane, 4]: fragments of tensor-core tiles; null: no dq
  int32_t num_key_blocks, num_query_blocks;  // of the longest sequence
  int32_t section;  // key heads whose key blocks take turns, see heads_together()
  // Deterministic: blocks take tickets, and the sums of a tile of queries are added in the order of the key blocks.
  bool deterministic;
  int32_t descending;  // sm_80, causal: of so many heads at the end the first keys come first, see backward_sm80_task()
  bool first_stores;  // sm_90a: who adds first to a tile stores, and sums to which nobody adds are never written
  uint8_t dalibi_split;  // parts of dalibi a key block and head
  int32_t* ticket;  // [2]: of key blocks; of query blocks, where another pass makes dq
  int32_t* turn;    // [head, batch, query block, turns_per_block]: who has added, see DqSums
  int32_t turns_per_block, block_m;
  // sm_90a: lse / scale and delta as columns of a product, [head, padded row / 8, {lse, delta}, row % 8, 8 bfloat16 of
  // which 3 are used: their sum is the value]; null: not wanted.
  uint8_t* row_columns;
  float inverse_scale;       // 1 / scale, finite
  RunAgain* again;           // null: nothing is masked
  float* dalibi_parts;  // [batch, head, key block, dalibi_split]
  DbiasSum dbias;
  // sm_90a: [batch, key head], how many key blocks have added all that they have. post then runs beside the main kernel, and writes dq of
  // a head as soon as its key blocks have been counted. Null: it waits for the main kernel.
  int32_t* done;
  bool only_again;  // post: only if all has been computed again
  // sm_90a, with a bias: row_columns has lse itself instead, a float a row; +inf as in lse_log2.
  bool columns_are_lse;
};

TW_HOST_DEVICE inline int64_t padded_row(const SequenceParams& p, int64_t q_begin, int64_t b) {
  return p.packed_q ? (q_begin / kRowPadding + b) * kRowPadding
                    : b * ((p.seqlen_q + kRowPadding - 1) / kRowPadding * kRowPadding);
}

}  // namespace tilewise::cuda
