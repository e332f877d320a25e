#include "cli/cli.h"

#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "core/dtype.h"

namespace tilewise::cli {

CLI::App* add_command(CLI::App& app, const std::string& name, const std::string& description,
                      const std::string& examples) {
  CLI::App* command = app.add_subcommand(name, description);
  command->footer("\nExamples:\n" + examples);
  return command;
}

CLI::Option* add_text(CLI::App* command, const std::string& flag, std::string& value, const std::string& type,
                      const std::string& description) {
  return command->add_option(flag, value, description)->type_name(type);
}

int thread_count(const std::string& text) {
  return text.empty() ? tw_default_num_threads()
                      : to_number<int>("--threads", text, 1, 4096, "an integer of 1 to 4096");
}

tw_dtype dtype_named(std::string_view name) { return static_cast<tw_dtype>(dtype_from_name(name)); }

std::string dtype_text(int32_t dtype) { return dtype_name(dtype); }

std::string backend_text(int32_t backend) {
  constexpr const char* kNames[] = {"auto", "cpu", "cuda", "reference"};
  return backend >= 0 && backend < 4 ? kNames[backend] : "unknown";
}

std::string pass_text(int32_t pass) {
  return pass == TW_FORWARD ? "forward" : pass == TW_BACKWARD ? "backward" : "both";
}

Target target_named(const std::string& backend, const std::string& kernel, int threads) {
  Target target;
  for (int32_t n = TW_BACKEND_AUTO; n <= TW_BACKEND_REFERENCE; ++n)
    if (backend == backend_text(n)) target.backend = static_cast<tw_backend>(n);
  target.num_threads = threads;
  target.kernel = kernel;
  if (kernel.empty()) return target;
  std::string names;
  for (const tw_kernel_info& info : kernels()) {
    if (kernel == info.name) return target;
    names += std::string(names.empty() ? "" : ", ") + info.name;
  }
  throw UsageError("--kernel: \"" + kernel + "\": must be one of " + names);
}

Problem parse_problem(const std::string& text) {
  try {
    return Problem::parse(text);
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

std::string bytes_text(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1024;
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

std::string one_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  for (size_t at; (at = text.find('\n')) != std::string::npos;)
    text.replace(at, 1, at > 0 && text[at - 1] == ':' ? " " : "; ");
  return text;
}

std::string date_text() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::tm utc;
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
  return text;
}

void print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
    throw Failure(std::string("standard output: ") + std::strerror(errno));
}

}  // namespace tilewise::cli
