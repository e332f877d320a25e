// What every extern "C" function does around its work: no exception leaves, and a failure's text is kept per thread.
#pragma once
#include <exception>
#include <new>
#include <string>

#include "core/status.h"

namespace tilewise {

tw_status report(const Status& status) noexcept;  // keeps the message for tw_last_error()

template <class F>
tw_status guarded(F&& work) noexcept {
  try {
    return report(work());
  } catch (const std::bad_alloc&) {
    return report(Status(TW_OUT_OF_MEMORY, "out of memory"));
  } catch (const std::exception& error) {
    return report(Status(TW_INTERNAL, error.what()));
  } catch (...) {
    return report(Status(TW_INTERNAL, "unknown exception"));
  }
}

}  // namespace tilewise
