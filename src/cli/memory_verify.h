// Predicted memory against measured memory, on this machine's CPU or GPU.
#pragma once
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cli/cli.h"
#include "core/dtype.h"
#include "harness/inputs.h"

namespace tilewise::cli {

struct MemoryCheck {
  std::string problem, what, pass;      // what: "standard" or "tilewise"
  int64_t predicted = 0, measured = 0;  // above q, k and v

  double error() const;  // relative
  bool ok() const;       // within 1 % and 2 MiB: pages, thread stacks and the allocator's own share are counted too
};

// On the CPU each part runs in a process of its own, whose high-water mark is read. Standard attention runs where it is written
// for: dense tensors, f32, f16 and bf16, without bias, ALiBi and sinks.
std::vector<MemoryCheck> verify_memory(const Problem& problem, int threads);

// Tilewise alone: standard attention on a GPU wants a framework's products, and `tilewise.memory(..).verify()` in Python has them.
std::vector<MemoryCheck> verify_memory_on_gpu(const Problem& problem);

std::unique_ptr<harness::Inputs> verify_inputs(const tw_problem& problem);

// Bytes above q, k and v at the worst moment of the forward pass, or of both. `shapes`: the call's tensors in host memory; `given`:
// the same where the passes run. Peak watches that memory; Memory is bytes of it, with data() and fill().
template <class Peak, class Memory>
int64_t measure_passes(const tw_problem& problem, const tw_problem& forward, const tw_tensors& shapes, const tw_tensors& given,
                       bool backward, const tw_target& target) {
  struct Fresh {  // memory for a tensor of the same shape, contiguous
    static size_t bytes(const tw_tensor* like) {
      int64_t count = like != nullptr ? dtype_size(like->dtype) : 0;
      for (int32_t dim = 0; like != nullptr && dim < like->ndim; ++dim) count *= like->shape[dim];
      return static_cast<size_t>(count);
    }
    Fresh(const tw_tensor* like, int32_t device) : memory(bytes(like)) {
      if (like == nullptr) return;
      int64_t n[TW_MAX_DIMS] = {1, 1, 1, 1};
      std::copy_n(like->shape, like->ndim, n);
      tensor = tw_tensor_contiguous(memory.data(), static_cast<tw_dtype>(like->dtype), like->ndim, n[0], n[1], n[2], n[3]);
      tensor.device = device;
    }
    tw_tensor* get() { return tensor.ndim > 0 ? &tensor : nullptr; }

    Memory memory;
    tw_tensor tensor{};
  };
  const int32_t device = given.q->device;
  const Peak peak;
  Fresh o(shapes.o, device), lse(shapes.lse, device);
  tw_tensors t = given;
  t.o = o.get(), t.lse = lse.get();
  const tw_tensors first = harness::without_gradients(t);
  detail::require(tw_forward(&forward, &first, &target, nullptr));
  if (!backward) return peak.growth();
  Fresh dout(shapes.dout, device), dq(shapes.dq, device), dk(shapes.dk, device), dv(shapes.dv, device), dbias(shapes.dbias, device);
  dout.memory.fill(0x3c);
  t.dout = dout.get(), t.dq = dq.get(), t.dk = dk.get(), t.dv = dv.get(), t.dbias = dbias.get();
  detail::require(tw_backward(&problem, &t, &target, nullptr));
  return peak.growth();
}

}  // namespace tilewise::cli
