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
};

}  // namespace tilewise::cuda
