#include "cli/output_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "cli/cli.h"
#include "io/npy.h"

namespace tilewise::cli {
namespace {

namespace fs = std::filesystem;

// Creates a file beside `path`, under a temporary name that is returned; on failure removes it and throws.
std::string write_temporary(const std::string& path, std::initializer_list<std::span<const std::byte>> parts) {
  const std::string temporary = path + ".tmp" + std::to_string(getpid());
  const int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  int error = file < 0 ? errno : 0;
  for (std::span<const std::byte> part : parts)
    while (error == 0 && !part.empty()) {
      const ssize_t written = write(file, part.data(), part.size());
      if (written < 0 && errno != EINTR) error = errno;
      if (written > 0) part = part.subspan(static_cast<size_t>(written));
    }
  if (file >= 0 && close(file) != 0 && error == 0) error = errno;
  if (error == 0) return temporary;
  if (file >= 0) unlink(temporary.c_str());
  throw Failure(path + ": cannot be written: " + std::strerror(error));
}

void move_into_place(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) throw Failure(to + ": cannot be written: " + std::strerror(errno));
}

}  // namespace

OutputDirectory::OutputDirectory(const std::string& path) : path_(path) {
  std::error_code error;
  made_ = fs::create_directories(path, error);
  if (error || !fs::is_directory(path))
    throw UsageError("--out: \"" + path +
                     "\": cannot be made: " + (error ? error.message() : "it exists and is no directory"));
  if (access(path.c_str(), W_OK | X_OK) != 0)
    throw UsageError("--out: \"" + path + "\": cannot be written to: " + std::strerror(errno));
}

OutputDirectory::~OutputDirectory() {
  for (const std::string& temporary : temporaries_) unlink(temporary.c_str());
  if (made_ && !committed_) rmdir(path_.c_str());  // only if it is empty
}

void OutputDirectory::write_npy(const std::string& name, const io::Array& array) {
  const std::string path = (fs::path(path_) / (name + ".npy")).string();
  const std::string header = io::npy_header(array.dtype, array.shape);
  temporaries_.push_back(write_temporary(path, {std::as_bytes(std::span(header)), {array.data, array.bytes()}}));
  paths_.push_back(path);
}

void OutputDirectory::commit() {
  for (size_t n = 0; n < paths_.size(); ++n) move_into_place(temporaries_[n], paths_[n]);
  temporaries_.clear();
  committed_ = true;
}

void require_writable(const std::string& flag, const std::string& path) {
  try {
    if (fs::is_directory(path)) throw Failure(path + ": is a directory");
    unlink(write_temporary(path, {}).c_str());
  } catch (const Failure& failure) {
    throw UsageError(flag + ": " + failure.what());
  }
}

void write_text(const std::string& path, const std::string& text) {
  const std::string temporary = write_temporary(path, {std::as_bytes(std::span(text))});
  try {
    move_into_place(temporary, path);
  } catch (...) {
    unlink(temporary.c_str());
    throw;
  }
}

}  // namespace tilewise::cli
