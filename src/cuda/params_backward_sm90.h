// What the sm_90a backward kernels are told.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/config_sm80.h"
#include "cuda/params.h"

namespace tilewise::cuda {

struct BackwardSm90Params {
  CUtensorMap q, k, v, dout;  // [batch, head, panel, row, column]; one box = all panels, or one of them
  int32_t qk_loads, v_loads;  // boxes of a tile of q or k, of v or dout
  BackwardParams backward;
  float scale_log2;           // softmax_scale * log2(e), moved away from 0
  bool dk_aligned, dv_aligned;  // 16-bit elements, 16-byte aligned rows
  int32_t num_tasks;            // key blocks of all heads, handed out by backward.ticket
  int32_t section;              // of heads that take turns, see find_key_block()
  BackwardKind kind;
  // In two passes: query blocks of all heads, handed out by backward.ticket[1]; of heads that take turns; is dk's pass the first; may the
  // blocks of the second pass start where those of the first end; and is this kernel the second, which then waits for the first at its end only?
  int32_t num_query_tasks, query_section;
  bool keys_first, passes_overlap, second_pass;
  // Where tiles of bias are copied ahead: [batch, head, 1, query, key], boxes of box_rows by 16 keys, elements of so many bytes. A part of a tile
  // is so many rows of it (see BackwardSm90Config::bias_slots()), and chunks of it lie so many bytes apart: 0 where all queries have the
  // same bias, and one chunk of it is enough.
  struct {
    CUtensorMap map;
    int32_t box_rows, bytes, part_rows, chunk_bytes;
  } bias;
  // dbias itself, contiguous, where each of its elements belongs to one pair: stored and not summed. data null: backward.dbias.
  struct {
    void* data;
    int32_t dtype;  // tw_dtype
    int32_t seqlen_k;  // keys of a row, a multiple of 8
    int64_t batch, head;
  } dbias;
};

}  // namespace tilewise::cuda
