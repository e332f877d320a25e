#include "core/tuning.h"

#include <algorithm>
#include <charconv>
#include <vector>

namespace tilewise {
namespace {

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  for (text = trimmed(text); !text.empty();) {
    const size_t end = std::min(text.find(' '), text.size());
    words.push_back(text.substr(0, end));
    text = trimmed(text.substr(end));
  }
  return words;
}

std::string key_of(tw_problem problem) {
  problem.dropout_seed = problem.dropout_offset = 0;
  return format(problem);
}

}  // namespace

std::string format(const Choice& choice) {
  std::string text;
  const auto put = [&](const char* key, int64_t value) {
    if (value != 0) text += concat(text.empty() ? "" : " ", key, "=", value);
  };
  put("block_m", choice.block_m);
  put("block_n", choice.block_n);
  put("splits", choice.splits);
  return text;
}

Status parse_choice(std::string_view text, Choice* choice) {
  *choice = Choice();
  for (std::string_view word : words_of(text)) {
    const size_t equals = word.find('=');
    const std::string_view key = word.substr(0, equals),
                           value = equals == std::string_view::npos ? "" : word.substr(equals + 1);
    int64_t* member = key == "block_m"   ? &choice->block_m
                      : key == "block_n" ? &choice->block_n
                      : key == "splits"  ? &choice->splits
                                         : nullptr;
    if (member == nullptr) return invalid("config: \"", word, "\": must be block_m=, block_n= or splits=");
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), *member);
    if (error != std::errc() || end != value.data() + value.size() || *member < 1)
      return invalid("config: \"", word, "\": must be an integer >= 1");
  }
  return Status();
}

Tuning Tuning::parse(const std::string& name, std::string_view text, std::string_view version, std::string_view machine,
                     const std::vector<std::string>& gpus) {
  Tuning tuning;
  const auto unused = [&](const auto&... why) {
    Tuning none;
    none.note_ = concat("tuning ", name, ": not used: ", why...);
    return none;
  };
  std::string_view its_version, its_machine, its_gpu;
  size_t number = 0, unread = 0;
  for (; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text = text.substr(std::min(end + 1, text.size()));
    line = trimmed(line.substr(0, line.find('#')));
    if (line.empty()) continue;
    if (line.starts_with("tilewise ")) {
      its_version = trimmed(line.substr(9));
    } else if (line.starts_with("machine ")) {
      its_machine = trimmed(line.substr(8));
    } else if (line.starts_with("gpu ")) {
      its_gpu = trimmed(line.substr(4));
    } else if (line.starts_with("threads ")) {
      const std::string_view value = trimmed(line.substr(8));
      std::from_chars(value.data(), value.data() + value.size(), tuning.num_threads_);
    } else {
      const size_t colon = line.rfind(": ");
      tw_problem problem;
      Entry entry;
      const auto words =
          colon == std::string_view::npos ? std::vector<std::string_view>() : words_of(line.substr(colon + 2));
      if (words.empty() || !tilewise::parse(line.substr(0, colon), &problem).ok() ||
          !parse_choice(line.substr(colon + 2 + words[0].size()), &entry.choice).ok()) {
        ++unread;
        continue;
      }
      entry.kernel = words[0];
      tuning.entries_[key_of(problem)] = entry;
    }
  }
  if (its_version != version) return unused("made by version \"", its_version, "\", this is ", version);
  if (its_machine != machine) return unused("made on \"", its_machine, "\", this is \"", machine, "\"");
  for (const std::string& gpu : gpus) tuning.same_gpu_.push_back(gpu == its_gpu);
  tuning.note_ =
      concat("tuning ", name, ": ", tuning.entries_.size(), " problems for ", tuning.num_threads_, " threads");
  if (!its_gpu.empty()) tuning.note_ += concat(" and for \"", its_gpu, "\"");
  if (unread > 0) tuning.note_ += concat(", ", unread, " lines that do not read");
  return tuning;
}

const Tuning::Entry* Tuning::entry(const tw_problem& problem) const {
  const auto found = entries_.find(key_of(problem));
  return found == entries_.end() ? nullptr : &found->second;
}

const Tuning::Entry* Tuning::find(const tw_problem& problem, int32_t num_threads) const {
  return entries_.empty() || num_threads != num_threads_ ? nullptr : entry(problem);
}

const Tuning::Entry* Tuning::find_on_gpu(const tw_problem& problem, int32_t device_index) const {
  const auto index = static_cast<size_t>(device_index);
  return entries_.empty() || index >= same_gpu_.size() || !same_gpu_[index] ? nullptr : entry(problem);
}

}  // namespace tilewise
