// What the suites share: rows to run, and comparisons that name what differs.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "harness/check.h"
#include "harness/run.h"

namespace tilewise {

using namespace harness;

inline tw_problem problem_of(const std::string& text) {
  tw_problem problem;
  std::string error;
  if (!parse_problem(text, &problem, &error)) throw std::runtime_error(error);
  return problem;
}

// Names of the rows under test that take the problem.
inline std::vector<std::string> rows_for(const tw_problem& problem) {
  std::vector<std::string> names;
  for (const tw_kernel_info& kernel : kernels())
    if (under_test(kernel) && takes(kernel.name, problem, nullptr)) names.push_back(kernel.name);
  return names;
}
inline std::vector<std::string> rows_for(const std::string& text) { return rows_for(problem_of(text)); }

inline void run_ok(Inputs& inputs, const std::string& kernel, int threads = 0, const tw_executor* executor = nullptr) {
  const RunResult result = run(inputs, kernel, threads, executor);
  ASSERT_EQ(result.status, TW_OK) << result.message;
  if (!kernel.empty()) {
    ASSERT_EQ(result.kernel, kernel);
  }
}

// Outputs (and appended caches) of two runs, bit for bit.
inline void expect_same_bits(Inputs& a, Inputs& b, const std::string& what) {
  auto left = a.outputs(), right = b.outputs();
  ASSERT_EQ(left.size(), right.size());
  for (size_t n = 0; n < left.size(); ++n) {
    int64_t bad = -1;
    EXPECT_TRUE(left[n].buffer->same_elements(*right[n].buffer, &bad))
        << what << ": " << left[n].name << ", element " << bad << ": " << left[n].buffer->get(bad) << " and " << right[n].buffer->get(bad)
        << "\n  in \"" << problem_text(a.problem()) << "\"";
  }
}

// Rows that compute what a hidden NaN or infinity has touched again, by other sums: right, but not to the bit (docs/adr/0006).
inline bool computes_again(const std::string& kernel) { return kernel == "forward_sm90" || kernel == "backward_sm90"; }

inline void expect_check(const CheckRequest& request) {
  const CheckResult result = check(request);
  EXPECT_TRUE(result.ok || result.refused) << to_text(result);
}

// Largest |a - b| of two buffers of one shape; NaN counts as infinite.
inline double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double most = a.size() == b.size() ? 0 : INFINITY;
  for (size_t n = 0; n < a.size() && n < b.size(); ++n) {
    if (a[n] == b[n]) continue;
    const double difference = std::abs(a[n] - b[n]);
    most = std::isnan(difference) ? INFINITY : std::max(most, difference);
  }
  return most;
}

// A view of dimensions [begin, begin + count) along `dim`.
inline tw_tensor slice(const tw_tensor& x, int dim, int64_t begin, int64_t count, int64_t element_size) {
  tw_tensor view = x;
  view.data = static_cast<char*>(view.data) + begin * x.stride[dim] * element_size;
  view.shape[dim] = count;
  return view;
}

// Of a row of the table, by its name, which must outlive it.
inline tw_target target_for(const std::string& row) {
  tw_target target{};
  target.struct_size = sizeof target;
  target.kernel = row.c_str();
  return target;
}

}  // namespace tilewise
