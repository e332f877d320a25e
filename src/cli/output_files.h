// Files that appear complete or not at all.
#pragma once
#include <string>
#include <vector>

#include "io/array.h"

namespace tilewise::cli {

// Arrays in a directory: written under temporary names, all renamed by commit(). Without it, nothing is left behind.
class OutputDirectory {
 public:
  explicit OutputDirectory(const std::string& path);  // made if missing; a UsageError if it cannot be written to
  ~OutputDirectory();
  OutputDirectory(const OutputDirectory&) = delete;
  OutputDirectory& operator=(const OutputDirectory&) = delete;

  void write_npy(const std::string& name, const io::Array& array);  // throws Failure
  void commit();
  const std::vector<std::string>& paths() const { return paths_; }  // of what was written

 private:
  std::string path_;
  bool made_ = false;
  bool committed_ = false;
  std::vector<std::string> temporaries_, paths_;
};

// A UsageError now rather than a Failure after the work: can a file be made beside `path`?
void require_writable(const std::string& flag, const std::string& path);

// One text file, in the same way.
void write_text(const std::string& path, const std::string& text);

}  // namespace tilewise::cli
