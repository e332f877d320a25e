#include "core/plan.h"

#include "core/validate.h"

namespace tilewise {
namespace {

bool on_backend(const KernelRow& row, const tw_problem& problem, const Target& target) {
  if (target.backend != TW_BACKEND_AUTO) return row.backend == target.backend;
  return problem.device == TW_CUDA ? row.backend == TW_BACKEND_CUDA : row.backend != TW_BACKEND_CUDA;
}

// "" if the row can run the problem on this machine.
std::string why_not(const KernelRow& row, const tw_problem& problem) {
  if (row.pass != -1 && row.pass != problem.pass)
    return row.pass == TW_FORWARD ? "a forward kernel" : "a backward kernel";
  if (!row.available()) return concat("this machine (or its cap) has no ", row.isa);
  const bool on_gpu = row.backend == TW_BACKEND_CUDA;  // a row named by the caller meets any tensors
  if (on_gpu != (problem.device == TW_CUDA)) return on_gpu ? "the tensors are on the CPU" : "the tensors are on a GPU";
  return row.refusal(problem);
}

// Walks the table; appends one line for each refusal.
const KernelRow* choose(const tw_problem& problem, const Target& target, std::span<const KernelRow> rows,
                        std::string* refusals) {
  bool name_known = false, any_on_backend = false;
  for (const KernelRow& row : rows) {
    if (!target.kernel.empty() && target.kernel != row.name) continue;
    name_known = true;
    if (target.kernel.empty() && !on_backend(row, problem, target)) continue;
    any_on_backend = true;
    const std::string reason = why_not(row, problem);
    if (reason.empty()) return &row;
    if (row.pass == -1 || row.pass == problem.pass || !target.kernel.empty())
      *refusals += concat(row.name, ": ", reason, "\n");
  }
  if (target.kernel.empty() && !any_on_backend)  // every library has CPU rows and the reference
    *refusals += "backend \"cuda\": this library was built without its kernels; -DTILEWISE_CUDA=ON builds them\n";
  if (!name_known) *refusals += concat("kernel \"", target.kernel, "\": not in the table; `tilewise list` shows it\n");
  return nullptr;
}

// The backend whose cuts are tuned.
int32_t tuned_backend(const tw_problem& problem) { return problem.device == TW_CUDA ? TW_BACKEND_CUDA : TW_BACKEND_CPU; }

// What an earlier measurement found for this very problem; nullptr where there is none, or where it has no say: a caller's
// choice comes first, and blocks that follow the batch would break batch_invariant.
const Tuning::Entry* tuned_entry(const tw_problem& problem, const Target& target) {
  if (target.tuning == nullptr || !target.kernel.empty() || !target.choice.empty() || problem.batch_invariant) return nullptr;
  if (target.backend != TW_BACKEND_AUTO && target.backend != tuned_backend(problem)) return nullptr;
  return problem.device == TW_CUDA ? target.tuning->find_on_gpu(problem, target.device_index)
                                   : target.tuning->find(problem, target.num_threads);
}

// Does the row let a caller set what the choice sets?
Status check_choice(const tw_problem& problem, const Choice& choice, const KernelRow& row) {
  const std::string_view cuts = row.cuts;
  if (choice.empty()) return Status();
  if (cuts.empty()) return invalid("config: \"", format(choice), "\": ", row.name, " cuts by itself; must be NULL");
  for (const auto& [name, value] : {std::pair{"block_m", choice.block_m}, {"block_n", choice.block_n}, {"splits", choice.splits}})
    if (value != 0 && cuts.find(name) == std::string_view::npos)
      return invalid("config: \"", name, "=", value, "\": ", row.name, " takes ", cuts);
  if (choice.splits > 1 && problem.pass == TW_FORWARD && (problem.num_splits > 0 || problem.batch_invariant))
    return invalid("config: splits ", choice.splits, ": the problem says num_splits or batch_invariant; must be 1");
  return Status();
}

Status plan_as_said(const tw_problem& problem, const Target& target, std::span<const KernelRow> rows, Plan* plan) {
  std::string refusals;
  const KernelRow* row = choose(problem, target, rows, &refusals);
  if (row == nullptr) {
    if (!refusals.empty()) refusals.pop_back();
    return unsupported("no kernel takes \"", format(problem), "\"", refusals.empty() ? "" : ":\n", refusals);
  }
  TW_RETURN_IF_ERROR(check_choice(problem, target.choice, *row));
  plan->problem = problem;
  plan->target = target;
  plan->row = row;
  return row->plan(problem, target, plan);
}

}  // namespace

std::string Plan::text() const {
  return concat("kernel ", row->name, "\nconfig ", config, "\nsplits ", num_splits, "\ntasks ", num_tasks,
                "\nworkspace ", workspace_bytes, " bytes\nflops ", flops(problem), "\nbytes ", bytes_moved(problem), "\n");
}

Status make_plan(const tw_problem& problem, const Target& target, std::span<const KernelRow> rows, Plan* plan) {
  TW_RETURN_IF_ERROR(validate_problem(problem));
  if (const Tuning::Entry* entry = tuned_entry(problem, target); entry != nullptr) {
    Target tuned = target;
    tuned.kernel = entry->kernel;
    tuned.choice = entry->choice;
    Plan made;
    // A row or a cut that this version does not have: as if the file said nothing.
    if (plan_as_said(problem, tuned, rows, &made).ok() && made.row->backend == tuned_backend(problem)) {
      made.config += ", tuned";
      *plan = made;
      return Status();
    }
  }
  return plan_as_said(problem, target, rows, plan);
}

std::string explain(const tw_problem& problem, const Target& target, std::span<const KernelRow> rows) {
  std::string text = concat("problem ", format(problem), "\n");
  if (Status status = validate_problem(problem); !status.ok()) return text + "invalid: " + status.message() + "\n";
  std::string refusals;
  choose(problem, target, rows, &refusals);
  if (target.tuning != nullptr && !target.tuning->note().empty()) {
    const Tuning::Entry* entry = tuned_entry(problem, target);
    const std::string found = entry ? concat("; for this one ", entry->kernel, " ", format(entry->choice)) : "; none for this one";
    refusals += target.tuning->note() + found + "\n";
  }
  Plan plan;
  if (Status status = make_plan(problem, target, rows, &plan); !status.ok()) return text + status.message() + "\n";
  return text + refusals + plan.text();
}

}  // namespace tilewise
