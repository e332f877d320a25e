#include "cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace tilewise {
namespace {

constexpr int kMaxWorkers = 1024;
constexpr auto kSpin =
    std::chrono::microseconds(20);  // an idle thread watches for the next call this long, then sleeps

thread_local bool inside_task = false;  // a call from within a task runs in place

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Watches `done` for kSpin; false if it did not come true.
template <class F>
bool spin_until(F&& done) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int n = 0; n < 32; ++n) {
      if (done()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

void run_in_place(int64_t num_tasks, tw_task task, void* context) {
  const bool outer = inside_task;
  inside_task = true;
  for (int64_t index = 0; index < num_tasks; ++index) task(context, index, 0);
  inside_task = outer;
}

// Threads take part in a job by joining it under the mutex, which hands out the worker number. The caller closes the
// job once the indices have run out and waits only for those who joined: a thread that the system wakes late delays
// nobody.
class Pool {
 public:
  // False if another caller has the pool.
  bool run(int num_workers, int64_t num_tasks, tw_task task, void* context) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    int helpers = 0;
    {
      std::lock_guard lock(mutex_);
      grow(num_workers - 1);
      helpers = std::min<int>(num_workers - 1, static_cast<int>(threads_.size()));
      task_ = task;
      context_ = context;
      num_tasks_ = num_tasks;
      next_.store(0, std::memory_order_relaxed);
      num_workers_ = helpers + 1;
      joined_ = 1;  // the caller is worker 0
      open_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    for (int n = 0; n < helpers; ++n) wake_.notify_one();
    work(task, context, num_tasks, 0);
    {
      std::lock_guard lock(mutex_);
      open_ = false;
    }
    if (!spin_until([&] { return active_.load(std::memory_order_acquire) == 0; })) {
      std::unique_lock lock(mutex_);
      done_.wait(lock, [&] { return active_.load(std::memory_order_acquire) == 0; });
    }
    busy_.store(false, std::memory_order_release);
    return true;
  }

  void stop() {
    std::vector<std::thread> threads;
    {
      std::lock_guard lock(mutex_);
      stop_.store(true, std::memory_order_release);
      threads.swap(threads_);
    }
    wake_.notify_all();
    for (std::thread& thread : threads) inside_task ? thread.detach() : thread.join();
  }

 private:
  void grow(int wanted) {
    if (stop_.load(std::memory_order_acquire) || static_cast<int>(threads_.size()) >= wanted) return;
    sigset_t blocked, before;  // the application's signals are for its own threads; faults and profilers stay
    sigfillset(&blocked);
    for (int kept : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGPROF}) sigdelset(&blocked, kept);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    try {
      threads_.reserve(static_cast<size_t>(wanted));
      while (static_cast<int>(threads_.size()) < wanted) threads_.emplace_back([this] { serve(); });
    } catch (...) {  // no more threads to be had: those that exist share the work
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void work(tw_task task, void* context, int64_t num_tasks, int worker) {
    inside_task = true;
    for (;;) {
      const int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
      if (index >= num_tasks) break;
      task(context, index, worker);
    }
    inside_task = false;
  }

  void serve() {
    uint64_t seen = 0;
    for (;;) {
      spin_until([&] { return generation_.load(std::memory_order_acquire) != seen || stop_.load(); });
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen || stop_.load(); });
      if (stop_.load()) return;
      seen = generation_.load(std::memory_order_relaxed);
      if (!open_ || joined_ == num_workers_) continue;
      const int worker = joined_++;
      active_.fetch_add(1, std::memory_order_relaxed);
      const tw_task task = task_;
      void* const context = context_;
      const int64_t num_tasks = num_tasks_;
      lock.unlock();
      work(task, context, num_tasks, worker);
      lock.lock();
      if (active_.fetch_sub(1, std::memory_order_release) == 1) done_.notify_one();
    }
  }

  std::atomic<bool> busy_ = false;
  std::atomic<bool> stop_ = false;
  std::atomic<uint64_t> generation_ = 0;       // counts jobs
  std::atomic<int> active_ = 0;                // threads at work on the job, the caller aside
  alignas(64) std::atomic<int64_t> next_ = 0;  // written for every task: a cache line of its own

  alignas(64) std::mutex mutex_;  // guards what follows, and the changes of what precedes
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  tw_task task_ = nullptr;
  void* context_ = nullptr;
  int64_t num_tasks_ = 0;
  int num_workers_ = 0;
  int joined_ = 0;
  bool open_ = false;
};

std::atomic<Pool*> the_pool = nullptr;

Pool& pool() {
  Pool* existing = the_pool.load(std::memory_order_acquire);
  if (existing != nullptr) return *existing;
  Pool* created = new Pool;
  if (the_pool.compare_exchange_strong(existing, created, std::memory_order_acq_rel)) return *created;
  delete created;
  return *existing;
}

// Loading and unloading of the library. A forked child has none of the threads and may have found the mutex locked, so
// it leaves the old pool alone and starts afresh; a library that is unloaded, or a process that ends, waits for its
// threads. The pool itself stays allocated, for a caller that is still inside when the process ends.
struct Lifetime {
  Lifetime() {
    pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr, std::memory_order_relaxed); });
  }
  ~Lifetime() {
    if (Pool* existing = the_pool.load(std::memory_order_acquire)) existing->stop();
  }
} lifetime;

// The positive number that an environment variable holds, else 0. A list ("4,2", nested levels of OpenMP) counts by its
// head.
int number_in_environment(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) return 0;
  while (*text == ' ' || *text == '\t') ++text;
  const char* const end = text + std::strlen(text);
  int value = 0;
  const auto [rest, error] = std::from_chars(text, end, value);
  if (error != std::errc() || value < 1) return 0;
  if (rest != end && *rest != ',' && *rest != ' ') return 0;
  return std::min(value, kMaxWorkers);
}

// Cores that control group v2 grants this process, rounded up; 0 = no limit. The tightest level of the hierarchy
// counts.
int cpu_quota() {
  std::string path;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);)
    if (line.rfind("0::", 0) == 0) path = line.substr(3);
  double cores = 0;
  for (;;) {
    std::ifstream file("/sys/fs/cgroup" + path + "/cpu.max");  // "max 100000" or "150000 100000", in microseconds
    double quota = 0, period = 0;
    if (file >> quota >> period && quota > 0 && period > 0 && (cores == 0 || quota / period < cores))
      cores = quota / period;
    if (path.empty() || path[0] != '/' || path == "/") break;
    path.resize(path.find_last_of('/'));
  }
  return static_cast<int>(cores == static_cast<int>(cores) ? cores : cores + 1);
}

int cores_by_affinity() {
  for (int capacity = 1024; capacity <= 1 << 20; capacity *= 2) {  // EINVAL while the set is smaller than the kernel's
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(capacity));
    if (set == nullptr) break;
    const size_t size = CPU_ALLOC_SIZE(static_cast<size_t>(capacity));
    const int count = sched_getaffinity(0, size, set) == 0 ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

int default_num_threads() {
  for (const char* name : {"TILEWISE_NUM_THREADS", "OMP_NUM_THREADS"})
    if (const int number = number_in_environment(name); number > 0) return number;
  static const int quota =
      cpu_quota();  // files are slow to read, so once; affinity may change and costs one system call
  const int cores = std::min(cores_by_affinity(), kMaxWorkers);
  return quota > 0 ? std::min(quota, cores) : cores;
}

void parallel_for(const tw_executor* executor, int num_threads, int64_t num_tasks, tw_task task, void* context) {
  if (num_tasks <= 0) return;
  const int workers = executor ? executor->num_workers : std::min(num_threads, kMaxWorkers);
  if (inside_task || num_tasks == 1 || workers <= 1) return run_in_place(num_tasks, task, context);
  if (executor != nullptr) {
    struct Call {
      tw_task task;
      void* context;
    } call = {task, context};
    const tw_task marked = [](void* data, int64_t index, int32_t worker) {
      const Call& inner = *static_cast<const Call*>(data);
      const bool outer = inside_task;
      inside_task = true;
      inner.task(inner.context, index, worker);
      inside_task = outer;
    };
    return executor->parallel_for(executor->pool, num_tasks, marked, &call);
  }
  const int wanted = static_cast<int>(std::min<int64_t>(workers, num_tasks));
  if (!pool().run(wanted, num_tasks, task, context)) run_in_place(num_tasks, task, context);
}

}  // namespace tilewise
