// The plan as a value: which row runs, how it cuts the work, what it needs. Made by a pure function of problem and target.
#pragma once
#include <span>
#include <string>

#include "core/problem.h"
#include "core/status.h"
#include "core/tuning.h"

namespace tilewise {

struct KernelRow;

struct Target {  // tw_target with its defaults resolved
  int32_t backend = TW_BACKEND_AUTO;
  int32_t device_index = 0;
  int32_t num_threads = 0;                // CPU; > 0 once resolved
  std::string kernel;                     // "" = best
  const tw_executor* executor = nullptr;  // nullptr = the library's pool
  Choice choice;                          // empty = the row's own
  const Tuning* tuning = nullptr;         // consulted where neither kernel nor choice is given
};

struct Plan {
  tw_problem problem;
  Target target;
  const KernelRow* row = nullptr;
  std::string config;  // tile sizes, as text
  int64_t block_m = 0;
  int64_t block_n = 0;
  int64_t num_splits = 1;
  int64_t num_tasks = 0;
  int64_t workspace_bytes = 0;

  std::string text() const;
};

// A row of a backend's table. Its position is its rank.
struct KernelRow {
  const char* name;
  int32_t backend;  // tw_backend
  int32_t pass;     // tw_pass, -1 = both
  const char* isa;
  const char* summary;
  bool (*available)();                                  // can this machine run it?
  std::string (*refusal)(const tw_problem& problem);    // "" = it takes the problem; else why not
  Status (*plan)(const tw_problem& problem, const Target& target, Plan* plan);  // fills config .. workspace_bytes
  Status (*run)(const Plan& plan, const tw_tensors& tensors, void* workspace, void* stream);
  const char* cuts = "";  // what a Choice may set: of "block_m block_n splits"; "" = the row cuts by itself
};

// Walks the rows in order and plans with the first that takes the problem.
Status make_plan(const tw_problem& problem, const Target& target, std::span<const KernelRow> rows, Plan* plan);

// Every refusal on the way, one a line, then the plan.
std::string explain(const tw_problem& problem, const Target& target, std::span<const KernelRow> rows);

}  // namespace tilewise
