// Status: success, or a code with a sentence that names the argument, the value got and what is allowed.
#pragma once
#include <sstream>
#include <string>
#include <utility>

#include "tilewise/tilewise.h"

namespace tilewise {

class [[nodiscard]] Status {
 public:
  Status() = default;  // TW_OK
  Status(tw_status code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == TW_OK; }
  tw_status code() const { return code_; }
  const std::string& message() const { return message_; }
  bool operator==(const Status&) const = default;

 private:
  tw_status code_ = TW_OK;
  std::string message_;
};

// concat("head_dim ", 100, ": must be ...")
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
Status invalid(const Parts&... parts) {
  return Status(TW_INVALID_ARGUMENT, concat(parts...));
}

template <class... Parts>
Status unsupported(const Parts&... parts) {
  return Status(TW_UNSUPPORTED, concat(parts...));
}

}  // namespace tilewise

#define TW_RETURN_IF_ERROR(expression)                                  \
  do {                                                                  \
    if (::tilewise::Status tw_status_ = (expression); !tw_status_.ok()) \
      return tw_status_;                                                \
  } while (0)
