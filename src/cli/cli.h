// What the subcommands of `tilewise` share: exit statuses, errors, number parsing, and units in words.
#pragma once
#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tilewise/tilewise.hpp"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace tilewise::cli {

enum ExitStatus { kSuccess = 0, kFailed = 1, kUsage = 2 };

// Wrong use: one line that names the argument, the value and what is allowed; exit status 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The work itself failed: exit status 1.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Each adds one subcommand or more, whose callback sets *exit_status.
void add_inspect(CLI::App& app);
void add_run(CLI::App& app);
void add_check(CLI::App& app, int* exit_status);
void add_bench(CLI::App& app);
void add_memory(CLI::App& app, int* exit_status);
void add_tune(CLI::App& app);
void add_report(CLI::App& app, int* exit_status);

// Bold names and groups of the help are CLI11's; this sets what our subcommands have in common.
CLI::App* add_command(CLI::App& app, const std::string& name, const std::string& description,
                      const std::string& examples);
CLI::Option* add_text(CLI::App* command, const std::string& flag, std::string& value, const std::string& type,
                      const std::string& description);

// The whole text as a number in [least, most], else a UsageError.
template <class Number>
Number to_number(const std::string& flag, std::string_view text, Number least, Number most, const char* allowed) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= least && value <= most))
    throw UsageError(flag + ": \"" + std::string(text) + "\": must be " + allowed);
  return value;
}

int thread_count(const std::string& text);  // of --threads; "" = the library's default

tw_dtype dtype_named(std::string_view name);  // f32, f16, bf16, f64
std::string dtype_text(int32_t dtype);
std::string backend_text(int32_t backend);
std::string pass_text(int32_t pass);
Target target_named(const std::string& backend, const std::string& kernel, int threads);

Problem parse_problem(const std::string& text);  // a UsageError if it is none, or asks for what no plan can have

std::string bytes_text(double bytes);      // "1.5 MiB"
std::string seconds_text(double seconds);  // "3.21 ms"
std::string one_line(std::string text);    // newlines become "; "

std::string date_text();  // now, UTC, ISO 8601

void print(const std::string& text);  // to stdout; throws Failure if it cannot be written

}  // namespace tilewise::cli
