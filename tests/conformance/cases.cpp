#include "conformance/cases.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace tilewise {

std::vector<Case> read_cases() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(TILEWISE_TESTS_DIR) + "/cases"))
    if (entry.path().extension() == ".txt") files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<Case> cases;
  for (const auto& file : files) {
    std::ifstream in(file);
    std::string line;
    for (int number = 1; std::getline(in, line); ++number) {
      const size_t hash = line.find('#');
      std::string problem = line.substr(0, hash);
      problem.erase(problem.find_last_not_of(" \t") + 1);
      if (problem.empty()) continue;
      if (hash == std::string::npos) throw std::runtime_error(file.string() + ": line " + std::to_string(number) + " lacks its # comment");
      cases.push_back({file.stem().string() + "_" + std::to_string(number), problem, line.substr(line.find_first_not_of("# ", hash))});
    }
  }
  if (cases.empty()) throw std::runtime_error("no cases found");
  return cases;
}

std::string with_dtype(const std::string& problem, const std::string& dtype) {
  const size_t begin = problem.find(' ') + 1, end = problem.find(' ', begin);
  return problem.substr(0, begin) + dtype + problem.substr(end);
}

std::string backward_of(const std::string& problem) {
  std::istringstream words(problem);
  std::string word, result;
  while (words >> word) {
    const std::string key = word.substr(0, word.find('='));
    for (const char* none : {"pages", "new", "rotary", "rotary_seqlens", "cache_batch", "cache_batch_idx", "leftpad", "splits"})
      if (key == none) return "";
    if (key == "maxlogit" || key == "no_lse" || key == "dropout_mask") continue;
    if (!result.empty()) result += " ";
    result += word == "fwd" ? "bwd" : word;
  }
  return result;
}

}  // namespace tilewise
