// What attention takes in memory, before it is taken. Standard attention is written down as the allocations that it
// makes, in order; Tilewise is its outputs and the workspaces of its plans. docs/memory.md tells it in words.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "core/plan.h"
#include "core/problem.h"
#include "core/status.h"

namespace tilewise {

// Allocations and releases in order: what is live now, and what was live at the worst moment.
class Ledger {
 public:
  struct Entry {
    std::string name;
    std::string formula;  // with the numbers in it
    int64_t bytes;
  };

  void take(const std::string& name, const std::string& formula, int64_t bytes);
  void give(const std::string& name);
  int64_t live() const { return live_; }
  int64_t peak() const { return peak_; }
  const std::vector<Entry>& at_peak() const { return at_peak_; }
  void restart_peak() { peak_ = live_, at_peak_ = entries_; }

 private:
  std::vector<Entry> entries_, at_peak_;
  int64_t live_ = 0, peak_ = 0;
};

// Standard attention as a framework runs it: each intermediate a whole tensor, the softmax in float32, every tensor
// freed after its last use. In the backward pass at its worst: the probabilities, their gradient, the product of both
// and the gradient of the scores, all float32.
struct StandardMemory {
  Ledger forward, backward;  // backward goes on where forward ended
  int64_t saved = 0;         // by the forward pass for the backward one, beside q, k, v
  double bytes_moved = 0;    // matrices of sq x sk written once and read once per use, and what is linear
};
StandardMemory standard_memory(const tw_problem& problem, bool training);

tw_memory_options default_memory_options();

// The share of one device: heads over tensor_parallel devices, query rows over context_parallel ones.
Status device_share(const tw_problem& problem, const tw_memory_options& options, tw_problem* share);

// The forward problem whose result a backward problem starts from.
tw_problem forward_problem(const tw_problem& problem);

Status memory_of(const tw_problem& problem, const tw_memory_options& options, const Target& target,
                 std::span<const KernelRow> rows, tw_memory_info* out);

// The largest value of "sq" (and sk with it where they are equal; sk alone where sq is 1), "b" or "hq" (hk in
// proportion) whose total fits the budget; 0 if none does.
Status largest_that_fits(const tw_problem& problem, const tw_memory_options& options, const Target& target,
                         std::span<const KernelRow> rows, int64_t budget, std::string_view key, bool standard,
                         int64_t* out);

// The formulas with the numbers in them; for a GPU of the table (nullptr: none) the time that its arithmetic and its
// memory need.
std::string explain_memory(const tw_problem& problem, const tw_memory_options& options, const Target& target,
                           std::span<const KernelRow> rows, const tw_gpu* gpu);

// What standard attention needs above inputs and outputs, in the pass that the problem names.
int64_t standard_bytes(const tw_problem& problem);

std::span<const tw_model> models();  // models.def
std::span<const tw_gpu> gpus();      // gpus.def

}  // namespace tilewise
