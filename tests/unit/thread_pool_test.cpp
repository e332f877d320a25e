// cpu/thread_pool.h: every index once, exclusive workers, nesting, concurrent callers, executors, fork, environment.
#include "cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <thread>
#include <vector>

namespace tilewise {
namespace {

constexpr int kThreads = 4;

// Runs num_tasks tasks and checks the promises: each index once, workers in range and never twice at a time.
void expect_promises(const tw_executor* executor, int num_threads, int64_t num_tasks) {
  std::vector<std::atomic<int>> runs(static_cast<size_t>(num_tasks));
  std::vector<std::atomic<int>> busy(static_cast<size_t>(num_threads));
  std::atomic<int> clashes = 0, strays = 0;
  parallel_for(executor, num_threads, num_tasks, [&](int64_t index, int worker) {
    if (worker < 0 || worker >= num_threads) {
      ++strays;
      return;
    }
    if (busy[worker].exchange(1) != 0) ++clashes;
    ++runs[index];
    if (index % 16 == 0) std::this_thread::yield();
    busy[worker] = 0;
  });
  EXPECT_EQ(strays, 0);
  EXPECT_EQ(clashes, 0);
  for (int64_t n = 0; n < num_tasks; ++n) ASSERT_EQ(runs[n], 1) << "index " << n;
}

TEST(ThreadPool, EveryIndexOnce) {
  for (int num_threads : {1, 2, 3, kThreads, 9, 2})  // grows and is used narrower again
    for (int64_t num_tasks : {0, 1, 2, 3, 100, 5000}) expect_promises(nullptr, num_threads, num_tasks);
}

TEST(ThreadPool, ManyCallsInARow) {
  std::atomic<int64_t> sum = 0;
  for (int n = 0; n < 3000; ++n) parallel_for(nullptr, kThreads, 5, [&](int64_t index, int) { sum += index; });
  EXPECT_EQ(sum, 3000 * 10);
}

TEST(ThreadPool, SleepsAndWakes) {
  for (int n = 0; n < 5; ++n) {
    expect_promises(nullptr, kThreads, 64);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // well past the spinning
  }
}

TEST(ThreadPool, UsesSeveralThreads) {
  std::atomic<int> inside = 0;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  // Two tasks that each wait for the other: a pool that ran them one after the other would miss the deadline.
  parallel_for(nullptr, 2, 2, [&](int64_t, int) {
    ++inside;
    while (inside < 2 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  });
  EXPECT_LT(std::chrono::steady_clock::now(), deadline);
}

TEST(ThreadPool, IdleThreadsSleep) {
  expect_promises(nullptr, kThreads, 100);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const auto processor_time = [] {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double before = processor_time();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_LT(processor_time() - before, 0.05);
}

TEST(ThreadPool, WritesOfTasksAreSeenByTheCaller) {
  for (int n = 0; n < 500; ++n) {
    std::vector<int64_t> out(64, -1);  // plain memory: a missing barrier shows here, or under ThreadSanitizer
    parallel_for(nullptr, kThreads, 64, [&](int64_t index, int) { out[index] = index; });
    for (int64_t index = 0; index < 64; ++index) ASSERT_EQ(out[index], index);
  }
}

TEST(ThreadPool, NestedCallsRunInPlace) {
  std::atomic<int64_t> runs = 0;
  std::atomic<int> elsewhere = 0;
  parallel_for(nullptr, kThreads, 16, [&](int64_t, int) {
    const auto self = std::this_thread::get_id();
    parallel_for(nullptr, kThreads, 16, [&](int64_t, int worker) {
      ++runs;
      if (worker != 0 || std::this_thread::get_id() != self) ++elsewhere;
    });
  });
  EXPECT_EQ(runs, 256);
  EXPECT_EQ(elsewhere, 0);
}

TEST(ThreadPool, ConcurrentCallers) {
  std::vector<std::thread> callers;
  for (int n = 0; n < 6; ++n)
    callers.emplace_back([] {
      for (int k = 0; k < 200; ++k) expect_promises(nullptr, kThreads, 37);
    });
  for (std::thread& caller : callers) caller.join();
}

TEST(ThreadPool, ABusyPoolLeavesTheCallerOnItsOwn) {
  std::atomic<bool> started = false, release = false;
  std::thread holder([&] {
    parallel_for(nullptr, 2, 2, [&](int64_t, int) {
      started = true;
      while (!release) std::this_thread::yield();
    });
  });
  while (!started) std::this_thread::yield();
  const auto self = std::this_thread::get_id();
  int runs = 0;  // not atomic: one thread
  bool alone = true;
  parallel_for(nullptr, kThreads, 50, [&](int64_t, int worker) {
    ++runs;
    alone &= worker == 0 && std::this_thread::get_id() == self;
  });
  release = true;
  holder.join();
  EXPECT_EQ(runs, 50);
  EXPECT_TRUE(alone);
}

struct CountingExecutor {
  tw_executor executor = {};
  int calls = 0;

  CountingExecutor() {
    executor.struct_size = sizeof executor;
    executor.num_workers = 3;
    executor.pool = this;
    executor.parallel_for = [](void* pool, int64_t num_tasks, tw_task task, void* context) {
      ++static_cast<CountingExecutor*>(pool)->calls;
      std::atomic<int64_t> next = num_tasks;  // backwards: order is the executor's business
      std::vector<std::thread> threads;
      for (int32_t worker = 0; worker < 3; ++worker)
        threads.emplace_back([&, worker] {
          for (int64_t index; (index = --next) >= 0;) task(context, index, worker);
        });
      for (std::thread& thread : threads) thread.join();
    };
  }
};

TEST(ThreadPool, ExecutorRunsTheTasks) {
  CountingExecutor pool;
  expect_promises(&pool.executor, 3, 200);
  EXPECT_EQ(pool.calls, 1);
  expect_promises(&pool.executor, 3, 0);
  EXPECT_EQ(pool.calls, 1);
}

TEST(ThreadPool, NestedCallsOnAnExecutorRunInPlace) {
  CountingExecutor pool;
  std::atomic<int> runs = 0;
  parallel_for(&pool.executor, 3, 8,
               [&](int64_t, int) { parallel_for(&pool.executor, 3, 8, [&](int64_t, int) { ++runs; }); });
  EXPECT_EQ(runs, 64);
  EXPECT_EQ(pool.calls, 1);
}

// ThreadSanitizer cannot start threads in a forked child.
#if defined(__SANITIZE_THREAD__)
#define SKIP_UNDER_THREAD_SANITIZER() GTEST_SKIP() << "ThreadSanitizer starts no threads after fork"
#else
#define SKIP_UNDER_THREAD_SANITIZER() static_cast<void>(0)
#endif

TEST(ThreadPool, AForkedChildHasAPoolOfItsOwn) {
  SKIP_UNDER_THREAD_SANITIZER();
  expect_promises(nullptr, kThreads, 100);  // threads exist, in the parent
  for (int n = 0; n < 5; ++n) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);  // a child that hangs is killed
      std::atomic<int> inside = 0;
      std::vector<int> runs(100);
      parallel_for(nullptr, 2, 2, [&](int64_t, int) {  // needs two threads to end
        ++inside;
        while (inside < 2) std::this_thread::yield();
      });
      parallel_for(nullptr, kThreads, 100, [&](int64_t index, int) { ++runs[index]; });
      for (int run : runs)
        if (run != 1) _exit(2);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
    expect_promises(nullptr, kThreads, 100);  // and the parent goes on
  }
}

TEST(ThreadPool, AForkWhileAnotherThreadHasThePool) {
  SKIP_UNDER_THREAD_SANITIZER();
  std::atomic<bool> stop = false;
  std::thread busy([&] {
    while (!stop) parallel_for(nullptr, kThreads, 20, [](int64_t, int) {});
  });
  for (int n = 0; n < 20; ++n) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);
      std::atomic<int> runs = 0;
      parallel_for(nullptr, kThreads, 30, [&](int64_t, int) { ++runs; });
      _exit(runs == 30 ? 0 : 2);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  }
  stop = true;
  busy.join();
}

TEST(ThreadPool, ExitsCleanlyWithSleepingThreads) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        parallel_for(nullptr, kThreads, 100, [](int64_t, int) {});
        std::exit(7);  // runs the destructors of static objects
      },
      testing::ExitedWithCode(7), "");
}

// Sets an environment variable for a scope.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    value ? setenv(name, value, 1) : unsetenv(name);
  }
  ~Environment() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

int threads_with(const char* tilewise, const char* omp) {
  const Environment a("TILEWISE_NUM_THREADS", tilewise), b("OMP_NUM_THREADS", omp);
  return default_num_threads();
}

TEST(DefaultNumThreads, FollowsTheEnvironment) {
  EXPECT_EQ(threads_with("3", nullptr), 3);
  EXPECT_EQ(threads_with("3", "5"), 3);
  EXPECT_EQ(threads_with(nullptr, "5"), 5);
  EXPECT_EQ(threads_with(nullptr, "6,2"), 6);
  EXPECT_EQ(threads_with(" 7 ", nullptr), 7);
}

TEST(DefaultNumThreads, IgnoresWhatIsNoNumber) {
  const int cores = threads_with(nullptr, nullptr);
  EXPECT_GE(cores, 1);
  EXPECT_LE(cores, static_cast<int>(sysconf(_SC_NPROCESSORS_CONF)));
  for (const char* bad : {"", "0", "-2", "many", "3x", "99999999999999999999", "0x4", "2.5", "1e3"}) {
    EXPECT_EQ(threads_with(bad, nullptr), cores) << '"' << bad << '"';
    EXPECT_EQ(threads_with(bad, "5"), 5) << '"' << bad << '"';
  }
}

TEST(DefaultNumThreads, FollowsTheAffinityMask) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  CPU_ZERO(&one);
  for (int n = 0; n < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++n)
    if (CPU_ISSET(n, &before)) CPU_SET(n, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(threads_with(nullptr, nullptr), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

}  // namespace
}  // namespace tilewise
