// Without libFuzzer: feeds every file of the given folders to the target, and beside it every prefix of the file and
// the file with each byte replaced in a few ways.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "fuzz.h"

namespace {

using Bytes = std::vector<uint8_t>;

size_t feed(Bytes bytes) {
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  return 1;
}

size_t feed_all(const Bytes& bytes) {
  size_t count = feed(bytes);
  for (size_t length = 0; length < bytes.size(); ++length)
    count += feed({bytes.begin(), bytes.begin() + static_cast<int64_t>(length)});
  for (size_t at = 0; at < bytes.size(); ++at)
    for (const int change : {0x01, 0x10, 0x80, 0xff}) {
      Bytes changed = bytes;
      changed[at] = static_cast<uint8_t>(changed[at] ^ change);
      count += feed(changed);
    }
  Bytes longer = bytes;
  longer.push_back(' ');
  return count + feed(longer);
}

}  // namespace

int main(int argc, char** argv) {
  size_t files = 0, inputs = 0;
  for (int n = 1; n < argc; ++n)
    for (const auto& entry : std::filesystem::recursive_directory_iterator(argv[n])) {
      if (!entry.is_regular_file()) continue;
      std::ifstream stream(entry.path(), std::ios::binary);
      inputs += feed_all({std::istreambuf_iterator<char>(stream), {}});
      ++files;
    }
  std::printf("%zu files, %zu inputs\n", files, inputs);
  return files > 0 ? 0 : 1;  // an empty corpus tests nothing
}
