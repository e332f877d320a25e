// Checks that need no device. Nothing below this step checks arguments again.
#pragma once
#include "core/status.h"
#include "tilewise/tilewise.h"

namespace tilewise {

// Options and shapes against each other: ranges, divisibility, combinations that the contract excludes.
Status validate_problem(const tw_problem& problem);

// "[2, 3, 64]", for messages.
std::string list_text(const int64_t* values, int32_t count);

// Infers the shapes from the tensors, checks every tensor (dtype, shape, strides, device, lengths, page numbers) against
// them and against the options, and returns the complete problem. Reads cu_seqlens and other index tensors only where
// they lie on the CPU.
Status describe(const tw_problem& options, const tw_tensors& tensors, tw_problem* problem);

}  // namespace tilewise
