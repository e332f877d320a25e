// The C ABI over core and the backends; with dlpack.cpp the only place with extern "C" and try/catch.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "api/guard.h"
#include "api/kernels.h"
#include "core/dropout.h"
#include "core/dtype.h"
#include "core/memory.h"
#include "core/plan.h"
#include "core/problem.h"
#include "core/row_tensors.h"
#include "core/validate.h"
#include "cpu/isa.h"
#include "cpu/softmax.h"
#include "cpu/thread_pool.h"
#if defined(TILEWISE_HAVE_CUDA)
#include "cuda/one_call.h"
#include "cuda/softmax.h"
#endif

using namespace tilewise;

struct tw_plan {
  Plan plan;
};
struct tw_accumulator {
  std::unique_ptr<Accumulator> state;
};

namespace tilewise {
namespace {

thread_local std::string last_error;

// Every pointer of a call is checked through this: "argument: NULL, must ...".
template <class... Rest>
Status require(const void* pointer, const char* name, const Rest&... rest) {
  if (pointer == nullptr) return invalid(name, ": NULL");
  if constexpr (sizeof...(rest) > 0) return require(rest...);
  return Status();
}

size_t copy_text(const std::string& text, char* buffer, size_t capacity) {
  if (buffer != nullptr && capacity > 0) {
    const size_t length = std::min(text.size(), capacity - 1);
    std::memcpy(buffer, text.data(), length);
    buffer[length] = 0;
  }
  return text.size();
}

void copy_name(char* out, size_t capacity, const std::string& text) { copy_text(text, out, capacity); }

// Text functions have no status: they say what went wrong in the text.
template <class F>
size_t guarded_text(char* buffer, size_t capacity, F&& make) noexcept {
  try {
    return copy_text(make(), buffer, capacity);
  } catch (const std::exception& error) {
    return copy_text(error.what(), buffer, capacity);
  }
}

Status resolve_target(const tw_target* in, Target* out) {
  *out = Target();
  out->tuning = &loaded_tuning();
  if (in != nullptr) {
    if (in->struct_size != sizeof(tw_target))
      return invalid("target: struct_size ", in->struct_size, ", must be ", sizeof(tw_target));
    if (in->backend < TW_BACKEND_AUTO || in->backend > TW_BACKEND_REFERENCE)
      return invalid("target: backend ", in->backend, ", must be 0 (auto), 1 (cpu), 2 (cuda) or 3 (reference)");
    if (in->num_threads < 0) return invalid("target: num_threads ", in->num_threads, ", must be >= 0");
    if (in->device_index < 0) return invalid("target: device_index ", in->device_index, ", must be >= 0");
    if (in->executor != nullptr) {
      if (in->executor->struct_size != sizeof(tw_executor))
        return invalid("executor: struct_size ", in->executor->struct_size, ", must be ", sizeof(tw_executor));
      if (in->executor->num_workers < 1)
        return invalid("executor: num_workers ", in->executor->num_workers, ", must be >= 1");
      if (in->executor->parallel_for == nullptr) return invalid("executor: parallel_for is NULL");
    }
    out->backend = in->backend;
    out->device_index = in->device_index;
    out->num_threads = in->num_threads;
    out->kernel = in->kernel ? in->kernel : "";
    out->executor = in->executor;
    if (in->config != nullptr) TW_RETURN_IF_ERROR(parse_choice(in->config, &out->choice));
  }
  if (out->executor != nullptr)
    out->num_threads = out->executor->num_workers;
  else if (out->num_threads == 0)
    out->num_threads = default_num_threads();
  return Status();
}

Status check_problem(const tw_problem* problem, const char* name) {
  if (problem == nullptr) return invalid(name, ": NULL");
  if (problem->struct_size != sizeof(tw_problem))
    return invalid(name, ": struct_size ", problem->struct_size, ", must be ", sizeof(tw_problem), " (call tw_problem_init)");
  return Status();
}

Status check_tensors(const tw_tensors* tensors) {
  if (tensors == nullptr) return invalid("tensors: NULL");
  if (tensors->struct_size != sizeof(tw_tensors))
    return invalid("tensors: struct_size ", tensors->struct_size, ", must be ", sizeof(tw_tensors));
  return Status();
}

constexpr size_t kWorkspaceAlignment = 64;

struct AlignedDelete {
  void operator()(void* memory) const { ::operator delete(memory, std::align_val_t(kWorkspaceAlignment)); }
};

Status run_on_device(const Plan& plan, const tw_tensors& tensors, void* stream) {
  if (plan.row->backend == TW_BACKEND_CUDA) {
#if defined(TILEWISE_HAVE_CUDA)
    return cuda::run_with_stream_workspace(plan, tensors, stream);
#endif
  }
  std::unique_ptr<void, AlignedDelete> workspace(
      ::operator new(static_cast<size_t>(plan.workspace_bytes), std::align_val_t(kWorkspaceAlignment)));
  return plan.row->run(plan, tensors, workspace.get(), stream);
}

Status resolve_memory(const tw_problem* problem, const tw_memory_options* in, tw_memory_options* out) {
  TW_RETURN_IF_ERROR(check_problem(problem, "problem"));
  *out = in ? *in : default_memory_options();
  if (out->struct_size != sizeof(tw_memory_options))
    return invalid("options: struct_size ", out->struct_size, ", must be ", sizeof(tw_memory_options), " (call tw_memory_options_init)");
  return Status();
}

// One row of a public table by number.
template <class Row>
tw_status row_at(std::span<const Row> rows, int32_t index, Row* out) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(require(out, "out"));
    if (out->struct_size != sizeof(Row)) return invalid("out: struct_size ", out->struct_size, ", must be ", sizeof(Row));
    if (index < 0 || index >= static_cast<int32_t>(rows.size()))
      return invalid("index: ", index, ", must be in [0, ", rows.size(), ")");
    *out = rows[static_cast<size_t>(index)];
    return Status();
  });
}

tw_status one_call(tw_pass pass, const tw_problem* options, const tw_tensors* tensors, const tw_target* target, void* stream) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(check_tensors(tensors));
    tw_problem problem = default_problem();
    if (options != nullptr) {
      TW_RETURN_IF_ERROR(check_problem(options, "options"));
      problem = *options;
    }
    problem.pass = pass;
    TW_RETURN_IF_ERROR(describe(problem, *tensors, &problem));
    Target where;
    TW_RETURN_IF_ERROR(resolve_target(target, &where));
    if (tensors->q != nullptr && problem.device == TW_CUDA) where.device_index = tensors->q->device_index;
    Plan plan;
    TW_RETURN_IF_ERROR(make_plan(problem, where, all_kernels(), &plan));
    return run_on_device(plan, *tensors, stream);
  });
}

}  // namespace

tw_status report(const Status& status) noexcept {
  try {
    last_error = status.message();
  } catch (...) {
    last_error.clear();
  }
  return status.code();
}

}  // namespace tilewise

extern "C" {

const char* tw_version(void) {
#define TW_TEXT2(x) #x
#define TW_TEXT(x) TW_TEXT2(x)
  return TW_TEXT(TW_VERSION_MAJOR) "." TW_TEXT(TW_VERSION_MINOR) "." TW_TEXT(TW_VERSION_PATCH);
}

const char* tw_status_name(tw_status status) {
  switch (status) {
    case TW_OK: return "TW_OK";
    case TW_INVALID_ARGUMENT: return "TW_INVALID_ARGUMENT";
    case TW_UNSUPPORTED: return "TW_UNSUPPORTED";
    case TW_OUT_OF_MEMORY: return "TW_OUT_OF_MEMORY";
    case TW_DEVICE_ERROR: return "TW_DEVICE_ERROR";
    case TW_INTERNAL: return "TW_INTERNAL";
  }
  return "unknown status";
}

const char* tw_last_error(void) { return last_error.c_str(); }

size_t tw_struct_size(const char* name) {
  if (name == nullptr) return 0;
  const std::string_view which = name;
  if (which == "tw_tensor") return sizeof(tw_tensor);
  if (which == "tw_tensors") return sizeof(tw_tensors);
  if (which == "tw_problem") return sizeof(tw_problem);
  if (which == "tw_target") return sizeof(tw_target);
  if (which == "tw_executor") return sizeof(tw_executor);
  if (which == "tw_plan_info") return sizeof(tw_plan_info);
  if (which == "tw_kernel_info") return sizeof(tw_kernel_info);
  if (which == "tw_memory_options") return sizeof(tw_memory_options);
  if (which == "tw_memory_use") return sizeof(tw_memory_use);
  if (which == "tw_memory_info") return sizeof(tw_memory_info);
  if (which == "tw_model") return sizeof(tw_model);
  if (which == "tw_gpu") return sizeof(tw_gpu);
  return 0;
}

tw_tensor tw_tensor_contiguous(void* data, tw_dtype dtype, int32_t ndim, int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
  tw_tensor tensor{};
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.ndim = std::clamp(ndim, 1, TW_MAX_DIMS);
  const int64_t shape[TW_MAX_DIMS] = {n0, n1, n2, n3};
  int64_t stride = 1;
  for (int n = tensor.ndim - 1; n >= 0; --n) {
    tensor.shape[n] = shape[n];
    tensor.stride[n] = stride;
    stride *= shape[n];
  }
  return tensor;
}

void tw_problem_init(tw_problem* problem) {
  if (problem != nullptr) *problem = default_problem();
}

tw_status tw_describe(const tw_problem* options, const tw_tensors* tensors, tw_problem* out) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(check_problem(options, "options"));
    TW_RETURN_IF_ERROR(check_tensors(tensors));
    TW_RETURN_IF_ERROR(require(out, "out"));
    return describe(*options, *tensors, out);
  });
}

tw_status tw_problem_parse(const char* text, tw_problem* out) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(require(text, "text", out, "out"));
    tw_problem problem;
    TW_RETURN_IF_ERROR(parse(text, &problem));
    TW_RETURN_IF_ERROR(validate_problem(problem));
    *out = problem;
    return Status();
  });
}

size_t tw_problem_text(const tw_problem* problem, char* buffer, size_t capacity) {
  return guarded_text(buffer, capacity, [&] { return problem ? format(*problem) : std::string(); });
}

tw_status tw_forward(const tw_problem* options, const tw_tensors* tensors, const tw_target* target, void* stream) {
  return one_call(TW_FORWARD, options, tensors, target, stream);
}

tw_status tw_backward(const tw_problem* options, const tw_tensors* tensors, const tw_target* target, void* stream) {
  return one_call(TW_BACKWARD, options, tensors, target, stream);
}

tw_status tw_plan_create(const tw_problem* problem, const tw_target* target, tw_plan** out) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(check_problem(problem, "problem"));
    TW_RETURN_IF_ERROR(require(out, "out"));
    Target where;
    TW_RETURN_IF_ERROR(resolve_target(target, &where));
    auto plan = std::make_unique<tw_plan>();
    TW_RETURN_IF_ERROR(make_plan(*problem, where, all_kernels(), &plan->plan));
    *out = plan.release();
    return Status();
  });
}

void tw_plan_destroy(tw_plan* plan) { delete plan; }

tw_status tw_plan_get_info(const tw_plan* plan, tw_plan_info* out) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(require(plan, "plan", out, "out"));
    if (out->struct_size != sizeof(tw_plan_info))
      return invalid("out: struct_size ", out->struct_size, ", must be ", sizeof(tw_plan_info));
    const Plan& from = plan->plan;
    out->backend = from.row->backend;
    copy_name(out->kernel, sizeof out->kernel, from.row->name);
    copy_name(out->config, sizeof out->config, from.config);
    out->num_splits = from.num_splits;
    out->num_tasks = from.num_tasks;
    out->workspace_bytes = from.workspace_bytes;
    out->standard_bytes = standard_bytes(from.problem);
    out->flops = flops(from.problem);
    out->bytes_moved = bytes_moved(from.problem);
    return Status();
  });
}

size_t tw_plan_text(const tw_plan* plan, char* buffer, size_t capacity) {
  return guarded_text(buffer, capacity, [&] { return plan ? plan->plan.text() : std::string(); });
}

tw_status tw_run(const tw_plan* plan, const tw_tensors* tensors, void* workspace, size_t workspace_bytes, void* stream) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(require(plan, "plan"));
    TW_RETURN_IF_ERROR(check_tensors(tensors));
    const Plan& run = plan->plan;
    tw_problem problem;
    TW_RETURN_IF_ERROR(describe(run.problem, *tensors, &problem));
    if (!(problem == run.problem))
      return invalid("tensors: they make \"", format(problem), "\", the plan is for \"", format(run.problem), "\"");
    const auto needed = static_cast<size_t>(run.workspace_bytes);
    if (workspace_bytes < needed) return invalid("workspace_bytes: ", workspace_bytes, ", must be at least ", needed);
    if (needed > 0 && workspace == nullptr) return invalid("workspace: NULL, must hold ", needed, " bytes");
    if (reinterpret_cast<uintptr_t>(workspace) % kWorkspaceAlignment != 0)
      return invalid("workspace: ", workspace, ", must be ", kWorkspaceAlignment, "-byte aligned");
    return run.row->run(run, *tensors, workspace, stream);
  });
}

int32_t tw_default_num_threads(void) { return default_num_threads(); }

tw_status tw_softmax(const tw_tensor* x, tw_tensor* y, tw_tensor* lse, const tw_target* target, void* stream) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(require(x, "x", y, "y"));
    Target where;
    TW_RETURN_IF_ERROR(resolve_target(target, &where));
#if defined(TILEWISE_HAVE_CUDA)
    if (x->device == TW_CUDA) {
      TW_RETURN_IF_ERROR(check_softmax(*x, *y, lse));
      return cuda::softmax(*x, *y, lse, stream);
    }
#endif
    (void)stream;
    return softmax(*x, *y, lse, where.num_threads, where.executor);
  });
}

tw_status tw_accumulator_create(int64_t num_rows, int64_t value_dim, tw_accumulator** out) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(require(out, "out"));
    auto accumulator = std::make_unique<tw_accumulator>();
    TW_RETURN_IF_ERROR(Accumulator::create(num_rows, value_dim, &accumulator->state));
    *out = accumulator.release();
    return Status();
  });
}

void tw_accumulator_destroy(tw_accumulator* accumulator) { delete accumulator; }

tw_status tw_accumulator_push(tw_accumulator* accumulator, const tw_tensor* scores, const tw_tensor* values) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(require(accumulator, "accumulator", scores, "scores"));
    return accumulator->state->push(*scores, values);
  });
}

tw_status tw_accumulator_merge(tw_accumulator* into, const tw_accumulator* from) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(require(into, "into", from, "from"));
    return into->state->merge(*from->state);
  });
}

tw_status tw_accumulator_lse(const tw_accumulator* accumulator, tw_tensor* lse) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(require(accumulator, "accumulator", lse, "lse"));
    return accumulator->state->lse(*lse);
  });
}

tw_status tw_accumulator_result(const tw_accumulator* accumulator, tw_tensor* result) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(require(accumulator, "accumulator", result, "result"));
    return accumulator->state->result(*result);
  });
}

tw_status tw_accumulator_probabilities(const tw_accumulator* accumulator, const tw_tensor* scores, tw_tensor* probabilities) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(require(accumulator, "accumulator", scores, "scores", probabilities, "probabilities"));
    return accumulator->state->probabilities(*scores, *probabilities);
  });
}

tw_status tw_merge_states(tw_tensor* o, tw_tensor* lse, const tw_tensor* o_other, const tw_tensor* lse_other, void* stream) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(require(o, "o", lse, "lse", o_other, "o_other", lse_other, "lse_other"));
#if defined(TILEWISE_HAVE_CUDA)
    if (o->device == TW_CUDA) {
      TW_RETURN_IF_ERROR(check_merge_states(*o, *lse, *o_other, *lse_other));
      return cuda::merge_states(*o, *lse, *o_other, *lse_other, stream);
    }
#endif
    (void)stream;
    return merge_states(*o, *lse, *o_other, *lse_other);
  });
}

int32_t tw_dropout_keep(double dropout_p, uint64_t seed, uint64_t offset, int64_t batch_head, int64_t i, int64_t j) {
  return Dropout::make(dropout_p, seed, offset).keep(batch_head, i, j);
}

int32_t tw_kernel_count(void) { return static_cast<int32_t>(all_kernels().size()); }

tw_status tw_kernel_at(int32_t index, tw_kernel_info* out) {
  return guarded([&]() -> Status {
    TW_RETURN_IF_ERROR(require(out, "out"));
    if (out->struct_size != sizeof(tw_kernel_info))
      return invalid("out: struct_size ", out->struct_size, ", must be ", sizeof(tw_kernel_info));
    const auto rows = all_kernels();
    if (index < 0 || index >= static_cast<int32_t>(rows.size()))
      return invalid("index: ", index, ", must be in [0, ", rows.size(), ")");
    const KernelRow& row = rows[static_cast<size_t>(index)];
    out->backend = row.backend;
    out->pass = row.pass;
    out->available = row.available();
    copy_name(out->name, sizeof out->name, row.name);
    copy_name(out->isa, sizeof out->isa, row.isa);
    copy_name(out->summary, sizeof out->summary, row.summary);
    return Status();
  });
}

size_t tw_explain(const tw_problem* problem, const tw_target* target, char* buffer, size_t capacity) {
  return guarded_text(buffer, capacity, [&]() -> std::string {
    if (Status status = check_problem(problem, "problem"); !status.ok()) return status.message() + "\n";
    Target where;
    if (Status status = resolve_target(target, &where); !status.ok()) return status.message() + "\n";
    return explain(*problem, where, all_kernels());
  });
}

size_t tw_machine_text(char* buffer, size_t capacity) {
  return guarded_text(buffer, capacity, [] {
    std::string text = concat("tilewise ", tw_version(), "\n", isa_text(), "threads ", default_num_threads(), "\n");
#if defined(TILEWISE_HAVE_CUDA)
    text += cuda::machine_text();
#else
    text += "cuda not built in\n";
#endif
    return text;
  });
}

void tw_memory_options_init(tw_memory_options* options) {
  if (options != nullptr) *options = default_memory_options();
}

tw_status tw_memory(const tw_problem* problem, const tw_memory_options* options, const tw_target* target, tw_memory_info* out) {
  return guarded([&]() -> Status {
    tw_memory_options with;
    TW_RETURN_IF_ERROR(resolve_memory(problem, options, &with));
    TW_RETURN_IF_ERROR(require(out, "out"));
    if (out->struct_size != sizeof(tw_memory_info))
      return invalid("out: struct_size ", out->struct_size, ", must be ", sizeof(tw_memory_info));
    Target where;
    TW_RETURN_IF_ERROR(resolve_target(target, &where));
    return memory_of(*problem, with, where, all_kernels(), out);
  });
}

tw_status tw_memory_largest(const tw_problem* problem, const tw_memory_options* options, const tw_target* target, int64_t budget,
                            const char* key, int32_t standard, int64_t* out) {
  return guarded([&]() -> Status {
    tw_memory_options with;
    TW_RETURN_IF_ERROR(resolve_memory(problem, options, &with));
    TW_RETURN_IF_ERROR(require(key, "key", out, "out"));
    Target where;
    TW_RETURN_IF_ERROR(resolve_target(target, &where));
    return largest_that_fits(*problem, with, where, all_kernels(), budget, key, standard != 0, out);
  });
}

size_t tw_memory_explain(const tw_problem* problem, const tw_memory_options* options, const tw_target* target, const char* gpu,
                         char* buffer, size_t capacity) {
  return guarded_text(buffer, capacity, [&]() -> std::string {
    tw_memory_options with;
    if (Status status = resolve_memory(problem, options, &with); !status.ok()) return status.message() + "\n";
    Target where;
    if (Status status = resolve_target(target, &where); !status.ok()) return status.message() + "\n";
    const tw_gpu* found = nullptr;
    for (const tw_gpu& known : gpus())
      if (gpu != nullptr && std::string_view(gpu) == known.name) found = &known;
    if (gpu != nullptr && found == nullptr) return concat("gpu \"", gpu, "\": not in the table of tw_gpu_at\n");
    return explain_memory(*problem, with, where, all_kernels(), found);
  });
}

int32_t tw_model_count(void) { return static_cast<int32_t>(models().size()); }
tw_status tw_model_at(int32_t index, tw_model* out) { return row_at(models(), index, out); }
int32_t tw_gpu_count(void) { return static_cast<int32_t>(gpus().size()); }
tw_status tw_gpu_at(int32_t index, tw_gpu* out) { return row_at(gpus(), index, out); }

}  // extern "C"
