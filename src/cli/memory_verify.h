// Predicted memory against measured memory, on this machine's CPU or GPU.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "cli/cli.h"
#include "harness/inputs.h"

namespace tilewise::cli {

struct MemoryCheck {
  std::string problem, what, pass;      // what: "standard" or "tilewise"
  int64_t predicted = 0, measured = 0;  // above q, k and v

  double error() const;  // relative
  bool ok() const;       // within 1 % and 2 MiB: pages, thread stacks and the allocator's own share are counted too
};

// On the CPU each part runs in a process of its own, whose high-water mark is read. Standard attention runs where it is written
// for: dense tensors, f32, f16 and bf16, without bias, ALiBi and sinks.
std::vector<MemoryCheck> verify_memory(const Problem& problem, int threads);

// Tilewise alone: standard attention on a GPU wants a framework's products, and `tilewise.memory(..).verify()` in Python has them.
std::vector<MemoryCheck> verify_memory_on_gpu(const Problem& problem);

std::unique_ptr<harness::Inputs> verify_inputs(const tw_problem& problem);

}  // namespace tilewise::cli
