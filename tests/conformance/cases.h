// Lines of tests/cases/*.txt: a problem string, then # and the model or the edge that it stands for.
#pragma once
#include <ostream>
#include <string>
#include <vector>

namespace tilewise {

struct Case {
  std::string name;     // file and line, fit for a test's name
  std::string problem;
  std::string comment;
};

inline void PrintTo(const Case& one, std::ostream* out) { *out << one.problem; }

// A comment that begins with "forward only" keeps a line from being tried backward.
std::vector<Case> read_cases();

// The problem in another dtype; "" if there is no sense in it (f64 is left alone).
std::string with_dtype(const std::string& problem, const std::string& dtype);

// The backward problem of a forward one; "" if it has none (a cache, pages, rotary).
std::string backward_of(const std::string& problem);

}  // namespace tilewise
