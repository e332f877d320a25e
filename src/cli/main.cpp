// `tilewise`: attention from the command line. Knows the public headers, src/io and src/harness.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/cli.h"

namespace {

constexpr const char* kFooter =
    "\nExit status: 0 success; 1 the work failed (a check above its tolerance, no memory, a full disk);\n"
    "2 wrong use or input (one line on stderr says which argument, its value and what is allowed; nothing is "
    "written).\n"
    "\nExamples:\n"
    "  tilewise run --q q.npy --k k.npy --v v.npy --causal --out result\n"
    "  tilewise check \"fwd bf16 b=2 hq=8 hk=2 sq=300 d=64 causal\"\n"
    "  tilewise bench \"fwd f32 hq=16 sq=2048 d=64\" --standard\n"
    "  tilewise memory --model llama3-8b --budget 24GiB\n"
    "  tilewise explain \"bwd f16 hq=8 sq=1024 d=128 window=256,0\"\n"
    "\nA problem is text: fwd|bwd, a dtype (f32 f16 bf16 f64), then key=value and flags: b (batch, default 1), hq and "
    "hk\n"
    "(query and key heads), sq and sk (lengths), d and dv (head dimensions), causal, window=LEFT,RIGHT, scale=, "
    "softcap=,\n"
    "dropout=, ... (tw_problem in tilewise.h lists all).";

int fail(const CLI::App& app, int status, const std::string& message) {
  const std::vector<CLI::App*> commands = app.get_subcommands();
  const std::string name = commands.empty() ? "tilewise" : "tilewise " + commands.front()->get_name();
  std::fprintf(stderr, "%s: %s\n", name.c_str(), tilewise::cli::one_line(message).c_str());
  return status;
}

// CLI11 would only say that a subcommand is required.
void require_known_command(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::string names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name() == argv[1]) return;
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  throw tilewise::cli::UsageError("\"" + std::string(argv[1]) + "\": must be one of " + names);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace tilewise::cli;
  int exit_status = kSuccess;
  CLI::App app("Tilewise: exact attention, tile by tile, in linear memory.", "tilewise");
  app.require_subcommand(1);
  app.footer(kFooter);
  app.set_version_flag("--version", "tilewise " + tilewise::version());
  try {
    add_run(app);
    add_check(app, &exit_status);
    add_bench(app);
    add_memory(app, &exit_status);
    add_tune(app);
    add_report(app, &exit_status);
    add_inspect(app);
    require_known_command(app, argc, argv);
    app.parse(argc, argv);
    return exit_status;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    const bool bare = argc == 1;
    return fail(app, kUsage, std::string(error.what()) + (bare ? "; see tilewise --help" : ""));
  } catch (const UsageError& error) {
    return fail(app, kUsage, error.what());
  } catch (const tilewise::Error& error) {
    const bool usage = error.status() == TW_INVALID_ARGUMENT || error.status() == TW_UNSUPPORTED;
    return fail(app, usage ? kUsage : kFailed, error.what());
  } catch (const std::bad_alloc&) {
    return fail(app, kFailed, "out of memory");
  } catch (const std::exception& error) {
    return fail(app, kFailed, error.what());
  }
}
