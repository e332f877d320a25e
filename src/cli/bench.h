// Timing problems: what `tilewise bench` prints and `tilewise report` shows.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace tilewise::cli {

struct BenchRequest {
  std::vector<std::string> problems;
  std::string kernel;
  int threads = 0;
  double seconds = 1;  // per problem
  bool standard = false;
};

// Machine, version, samples and peaks, as in `tilewise bench --json`.
nlohmann::ordered_json bench_record(const BenchRequest& request);

}  // namespace tilewise::cli
