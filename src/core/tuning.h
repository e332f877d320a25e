// How a kernel cuts a problem where the default is not wanted: said by tw_target.config, or kept in the file of `tilewise tune`.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/problem.h"
#include "core/status.h"

namespace tilewise {

struct Choice {  // 0 = the row's own
  int64_t block_m = 0;  // query rows of a block
  int64_t block_n = 0;  // keys of a block
  int64_t splits = 0;   // parts of the keys: merged by lse forward, summed into dq backward

  bool empty() const { return block_m == 0 && block_n == 0 && splits == 0; }
  bool operator==(const Choice&) const = default;
};

std::string format(const Choice& choice);  // "block_m=48 block_n=128"; "" if empty
Status parse_choice(std::string_view text, Choice* choice);

// Winners of an earlier measurement on this machine. Text, a line a problem:
//
//   tilewise 0.1.0
//   machine cpu scalar avx2; caches L1d 32 KiB L2 1024 KiB L3 32768 KiB
//   threads 2
//   gpu NVIDIA H200, sm_90, 132 multiprocessors
//   fwd f32 b=1 hq=16 sq=2048 d=64: forward_avx2 block_m=48 block_n=256    # 10.2 ms, default 10.9 ms
//   fwd bf16 cuda b=1 hq=16 sq=2048 d=64: forward_sm90 block_m=256 block_n=64
//
// A file of another version or machine, problems of a GPU on another one, and whatever does not read, are not used, and
// explain says so.
class Tuning {
 public:
  struct Entry {
    std::string kernel;
    Choice choice;
  };

  // gpus: those of this machine, in order, as in "NVIDIA H200, sm_90, 132 multiprocessors".
  static Tuning parse(const std::string& name, std::string_view text, std::string_view version, std::string_view machine,
                      const std::vector<std::string>& gpus = {});

  const Entry* find(const tw_problem& problem, int32_t num_threads) const;  // seed and offset do not matter
  const Entry* find_on_gpu(const tw_problem& problem, int32_t device_index) const;
  size_t size() const { return entries_.size(); }
  const std::string& note() const { return note_; }  // "tuning FILE: ...", one line; "" without a file

 private:
  const Entry* entry(const tw_problem& problem) const;

  std::map<std::string, Entry, std::less<>> entries_;
  int32_t num_threads_ = 0;
  std::vector<bool> same_gpu_;  // by device index: is it the file's?
  std::string note_;
};

}  // namespace tilewise
