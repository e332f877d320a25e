// How fast each level of this machine's memory can be read: one thread sums arrays from 4 KiB to 1 GiB, over and over.
// No part of the build, for it is compiled for the machine at hand:
//
//   g++ -std=c++20 -O3 -march=native bench/memory_levels.cpp -o build/memory_levels
//   build/memory_levels > bench/results/memory_levels.json
//
// Eight vectors of sums hide the latency of the additions, so what is left is the loads. A sample is 8 MiB, a millisecond
// or less: small arrays many times, large ones piece by piece, so that the scheduler spoils few of them. The fast quarter
// counts: neighbours on the machine only ever slow a reading down, but the fastest piece of an array may have stayed in a cache.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

namespace {

using Vector [[gnu::vector_size(64)]] = float;

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// noinline: else the compiler sees that a second sum of the same array is the first one.
[[gnu::noinline]] Vector sum(const Vector* x, size_t count) {
  Vector sums[8] = {};
  for (size_t n = 0; n < count; n += 8)
    for (size_t k = 0; k < 8; ++k) sums[k] += x[n + k];
  Vector total = {};
  for (const Vector& part : sums) total += part;
  return total;
}

std::string line_of(const char* file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);)
    if (line.rfind(key, 0) == 0) return line.substr(line.find(':') == std::string::npos ? 0 : line.find(':') + 2);
  return "";
}

// "32K" of the cache that a core finds at this index of its list; 0 if the system does not say.
long cache_kib(int index) {
  std::ifstream in("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
  long kib = 0;
  in >> kib;
  return kib;
}

}  // namespace

int main() {
  constexpr size_t kLargest = size_t{1} << 30, kSample = size_t{8} << 20;
  auto* data = static_cast<Vector*>(std::aligned_alloc(4096, kLargest));
  if (data == nullptr) return std::fputs("memory_levels: no memory for 1 GiB\n", stderr), 1;
  std::memset(static_cast<void*>(data), 0, kLargest);
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  std::string load;
  std::ifstream("/proc/loadavg") >> load;
  std::printf("{\n \"tool\": \"bench/memory_levels.cpp\",\n \"date\": \"%s\",\n \"processor\": \"%s\",\n \"load_average\": %s,\n", date,
              line_of("/proc/cpuinfo", "model name").c_str(), load.c_str());
  std::printf(" \"caches_kib\": {\"L1d\": %ld, \"L2\": %ld, \"L3\": %ld},\n \"unit\": \"GB/s, read by one thread\",\n \"points\": [",
              cache_kib(0), cache_kib(2), cache_kib(3));
  volatile float sink = 0;
  const char* separator = "\n";
  for (size_t bytes = 4096; bytes <= kLargest; bytes *= 2)
    for (const size_t size : {bytes, bytes + bytes / 2}) {
      if (size > kLargest) break;
      const size_t chunk = std::min(size, kSample);
      std::vector<double> times;
      for (const double end = seconds() + 0.8; times.size() < 8 || seconds() < end;)
        for (size_t begin = 0; begin + chunk <= size; begin += chunk) {
          const size_t repeats = kSample / chunk;
          const double start = seconds();
          for (size_t r = 0; r < repeats; ++r) sink = sink + sum(data + begin / sizeof(Vector), chunk / sizeof(Vector))[0];
          times.push_back((seconds() - start) / static_cast<double>(repeats));
        }
      std::nth_element(times.begin(), times.begin() + static_cast<long>(times.size() / 4), times.end());
      const double quarter = times[times.size() / 4];
      std::printf("%s  {\"bytes\": %zu, \"gb_per_s\": %.1f}", separator, size, static_cast<double>(chunk) / quarter * 1e-9);
      separator = ",\n";
    }
  std::printf("\n ]\n}\n");
  std::free(data);
  return 0;
}
