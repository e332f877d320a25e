// The library's pool: sleeping threads, woken per call. Which thread runs a task never changes a result.
#pragma once
#include <cstdint>
#include <type_traits>

#include "tilewise/tilewise.h"

namespace tilewise {

// TILEWISE_NUM_THREADS, else OMP_NUM_THREADS, else the cores of this process's affinity mask and CPU quota.
int default_num_threads();

// Runs task(index, worker) for index in [0, num_tasks) on `executor`, or on the library's pool with num_threads workers
// (the caller is worker 0). A call while the pool is busy with another caller runs on the calling thread alone.
void parallel_for(const tw_executor* executor, int num_threads, int64_t num_tasks, tw_task task, void* context);

// The same for any callable f(int64_t index, int worker).
template <class F>
void parallel_for(const tw_executor* executor, int num_threads, int64_t num_tasks, F&& f) {
  parallel_for(
      executor, num_threads, num_tasks,
      [](void* context, int64_t index, int32_t worker) { (*static_cast<std::remove_reference_t<F>*>(context))(index, worker); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace tilewise
