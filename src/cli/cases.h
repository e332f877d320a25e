// Problem texts, one a line: `#` begins a comment, empty lines do not count.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace tilewise::cli {

std::vector<std::string> embedded_cases();  // of tests/cases, compiled in
std::vector<std::string> read_cases(const std::string& path);
std::vector<std::string> split_cases(std::string_view text);

}  // namespace tilewise::cli
