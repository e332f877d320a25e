// Standard attention as a framework runs it, for measuring its memory: every intermediate is a whole tensor, allocated
// and freed where standard_memory (src/core/memory.cpp) says. Slow.
#pragma once
#include <string>

#include "cli/cli.h"

namespace tilewise::cli {

std::string refuse_whole_standard(const tw_problem& problem);  // "" if it can run it

// The forward pass (training: it keeps what the backward pass needs), then the backward pass on request, on dense
// contiguous tensors. o, dq, dk and dv are allocated by it: they are part of what is measured. The caller frees them.
struct WholeStandard {
  void *o = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
};
WholeStandard run_whole_standard(const tw_problem& problem, bool training, bool backward, const void* q, const void* k,
                                 const void* v);

}  // namespace tilewise::cli
