// Predicted memory against measured memory, on this machine's CPU.
#pragma once
#include <string>
#include <vector>

#include "cli/cli.h"

namespace tilewise::cli {

struct MemoryCheck {
  std::string problem, what, pass;      // what: "standard" or "tilewise"
  int64_t predicted = 0, measured = 0;  // above q, k and v

  double error() const;  // relative
  bool ok() const;       // within 1 % and 2 MiB: pages, thread stacks and the allocator's own share are counted too
};

// Runs each part in a process of its own and reads its high-water mark. Standard attention runs where it is written
// for: dense tensors, f32, f16 and bf16, without bias, ALiBi and sinks.
std::vector<MemoryCheck> verify_memory(const Problem& problem, int threads);

}  // namespace tilewise::cli
