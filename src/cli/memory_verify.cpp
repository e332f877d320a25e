#include "cli/memory_verify.h"

#include <fmt/core.h>
#include <malloc.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <tuple>

#include "cli/memory.h"
#include "cli/standard_whole.h"
#include "core/dtype.h"
#include "harness/inputs.h"

namespace tilewise::cli {
namespace {

constexpr double kRelative = 0.01;
constexpr int64_t kAbsolute = int64_t{2} << 20;

// What a child reports.
struct Outcome {
  int64_t growth = -1;
  char error[240] = "";
};

// In a process of its own, whose high-water mark is this measurement's alone.
template <class F>
int64_t in_child(F&& measure) {
  int ends[2];
  if (pipe(ends) != 0) throw Failure("pipe: cannot be made");
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw Failure("fork: no process can be made");
  if (child == 0) {
    close(ends[0]);
    // Freed memory goes back to the system at once, and pages are 4 KiB: what is resident is what is allocated.
    mallopt(M_MMAP_THRESHOLD, 64 << 10);
    mallopt(M_TRIM_THRESHOLD, 64 << 10);
    prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
    Outcome result;
    try {
      result.growth = measure();
    } catch (const std::exception& error) {
      std::snprintf(result.error, sizeof result.error, "%s", error.what());
    }
    const bool written = write(ends[1], &result, sizeof result) == sizeof result;
    _exit(written ? 0 : 1);
  }
  close(ends[1]);
  Outcome result;
  const bool complete = read(ends[0], &result, sizeof result) == sizeof result;
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (!complete) throw Failure("the measured process ended without a result (out of memory?)");
  if (result.error[0] != 0) throw Failure(result.error);
  if (result.growth < 0) throw Failure("/proc/self/status: this system does not say how much memory is resident");
  return result.growth;
}

int64_t elements(const tw_tensor& tensor) {
  int64_t count = 1;
  for (int32_t dim = 0; dim < tensor.ndim; ++dim) count *= tensor.shape[dim];
  return count;
}

// Not touched before the library does.
class FreshPages {
 public:
  explicit FreshPages(size_t bytes) : bytes_(bytes), data_(std::aligned_alloc(64, std::max<size_t>((bytes + 63) / 64 * 64, 64)), &std::free) {
    if (!data_) throw std::bad_alloc();
  }
  void* data() const { return data_.get(); }
  void fill(int byte) { std::memset(data(), byte, bytes_); }

 private:
  size_t bytes_;
  std::unique_ptr<void, decltype(&std::free)> data_;
};

tw_problem forward_of(const harness::Inputs& inputs) {
  return inputs.problem().pass == TW_FORWARD ? inputs.problem() : inputs.forward_problem();
}

// Workers in turn on one thread: on a busy machine a worker of a real pool may come too late for any task, and its
// share of the workspace is then never touched.
void in_turn(void* pool, int64_t num_tasks, tw_task task, void* context) {
  const int32_t workers = *static_cast<const int32_t*>(pool);
  for (int64_t n = 0; n < num_tasks; ++n) task(context, n, static_cast<int32_t>(n % workers));
}

// Small problems of the same dtype first, so that threads, code and their pages are there before anything is counted.
void warm_up(const tw_problem& problem, const tw_target& target) {
  const int64_t group = problem.num_heads_q / std::max<int64_t>(problem.num_heads_k, 1);
  for (const int64_t queries : {int64_t{1}, int64_t{256}}) {
    const std::string text =
        fmt::format("{} {} b=2 hq={} hk=2 sq={} sk=256 d={} dv={}{}", problem.pass == TW_FORWARD ? "fwd" : "bwd",
                    dtype_text(problem.dtype), 2 * group, queries, problem.head_dim, problem.head_dim_v,
                    problem.causal ? " causal" : "");
    const Problem small = parse_problem(text);
    const auto inputs = verify_inputs(small.c());
    const tw_problem forward = forward_of(*inputs);
    const tw_tensors all = inputs->tensors(), t = harness::without_gradients(all);
    detail::require(tw_forward(&forward, &t, &target, nullptr));
    if (problem.pass == TW_BACKWARD) detail::require(tw_backward(&small.c(), &all, &target, nullptr));
  }
}

int64_t measure_tilewise(const tw_problem& problem, bool backward, const tw_target& target) {
  warm_up(problem, target);
  const auto inputs = verify_inputs(problem);
  const tw_tensors given = inputs->tensors();
  const tw_problem forward = forward_of(*inputs);
  return measure_passes<PeakMemory, FreshPages>(problem, forward, given, given, backward, target);
}

// Standard attention has to be attention: its o against Tilewise's.
void require_same(const tw_problem& forward, const tw_tensors& given, const void* o, const tw_target& target) {
  detail::require(tw_forward(&forward, &given, &target, nullptr));
  const int64_t count = elements(*given.o);
  const double bound = dtype_size(forward.dtype) < 4 ? 0.05 : 1e-4;
  for (int64_t n = 0; n < count; ++n) {
    const double a = load_element(o, forward.dtype, n), b = load_element(given.o->data, given.o->dtype, n);
    if (!(std::fabs(a - b) <= bound))
      throw Failure(
          fmt::format("o[{}] is {} by standard attention and {} by Tilewise: must agree within {}", n, a, b, bound));
  }
}

int64_t measure_standard(const tw_problem& problem, bool backward, const tw_target& target) {
  const auto inputs = verify_inputs(problem);
  const tw_tensors given = inputs->tensors();
  const PeakMemory peak;
  const WholeStandard out =
      run_whole_standard(problem, problem.pass == TW_BACKWARD, backward, given.q->data, given.k->data, given.v->data);
  const int64_t growth = peak.growth();
  require_same(forward_of(*inputs), harness::without_gradients(given), out.o, target);
  for (void* memory : {out.o, out.dq, out.dk, out.dv}) std::free(memory);
  return growth;
}

}  // namespace

std::unique_ptr<harness::Inputs> verify_inputs(const tw_problem& problem) {
  std::unique_ptr<harness::Inputs> inputs;
  std::string error;
  const tw_status status = harness::Inputs::make(problem, {}, &inputs, &error);
  if (status != TW_OK) throw Error(status, error);
  // Packed sequences as long as may be: workspace for rows of no sequence would not be touched.
  const tw_tensors t = inputs->tensors();
  for (const auto& [lengths, longest, total] :
       {std::tuple{t.cu_seqlens_q, problem.seqlen_q, problem.total_q}, std::tuple{t.cu_seqlens_k, problem.seqlen_k, problem.total_k}})
    for (int64_t n = 0; lengths != nullptr && n <= problem.batch; ++n)
      static_cast<int32_t*>(lengths->data)[n * lengths->stride[0]] = static_cast<int32_t>(std::min(n * longest, total));
  return inputs;
}

double MemoryCheck::error() const {
  return predicted == 0 ? 0 : static_cast<double>(measured - predicted) / static_cast<double>(predicted);
}

bool MemoryCheck::ok() const {
  return std::llabs(measured - predicted) <=
         static_cast<int64_t>(kRelative * static_cast<double>(predicted)) + kAbsolute;
}

std::vector<MemoryCheck> verify_memory(const Problem& problem, int threads) {
  const tw_problem& p = problem.c();
  if (p.device == TW_CUDA) return verify_memory_on_gpu(problem);
  int32_t workers = threads;
  const tw_executor executor = {sizeof(tw_executor), workers, &workers, in_turn};
  Target target = target_named("cpu", "", 0);
  target.executor = &executor;
  const tw_target where = target.c();
  const tw_memory_info info = memory(problem, target);
  std::vector<MemoryCheck> checks;
  const bool training = p.pass == TW_BACKWARD, standard = refuse_whole_standard(p).empty();
  const auto add = [&](const char* what, const char* pass, int64_t predicted, auto&& measure) {
    checks.push_back({problem.text(), what, pass, predicted, in_child(measure)});
  };
  if (standard)
    add("standard", "forward", info.standard.peak_forward, [&] { return measure_standard(p, false, where); });
  if (standard && training)
    add("standard", "backward", std::max(info.standard.peak_forward, info.standard.peak_backward),
        [&] { return measure_standard(p, true, where); });
  add("tilewise", "forward", info.tiled.peak_forward, [&] { return measure_tilewise(p, false, where); });
  if (training)
    add("tilewise", "backward", std::max(info.tiled.peak_forward, info.tiled.peak_backward),
        [&] { return measure_tilewise(p, true, where); });
  return checks;
}

}  // namespace tilewise::cli
