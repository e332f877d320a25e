#include "cli/cases.h"

#include "cases_embedded.h"  // made by CMake out of tests/cases/*.txt: kCaseFiles
#include "cli/cli.h"
#include "io/array.h"

namespace tilewise::cli {

std::vector<std::string> split_cases(std::string_view text) {
  std::vector<std::string> cases;
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    line = line.substr(0, line.find('#'));
    const size_t begin = line.find_first_not_of(" \t\r"), end = line.find_last_not_of(" \t\r");
    if (begin != std::string_view::npos) cases.emplace_back(line.substr(begin, end - begin + 1));
  }
  return cases;
}

std::vector<std::string> embedded_cases() {
  std::vector<std::string> cases;
  for (std::string_view file : kCaseFiles)
    for (std::string& line : split_cases(file)) cases.push_back(std::move(line));
  return cases;
}

std::vector<std::string> read_cases(const std::string& path) {
  std::shared_ptr<io::Buffer> file;
  if (const Status status = io::read_file(path, &file); !status.ok()) throw UsageError("--cases: " + status.message());
  std::vector<std::string> cases = split_cases({reinterpret_cast<const char*>(file->data()), file->size()});
  if (cases.empty()) throw UsageError("--cases: " + path + ": holds no problem");
  return cases;
}

}  // namespace tilewise::cli
