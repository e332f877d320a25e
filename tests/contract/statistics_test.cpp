// Errors must not lean to one side: rows with several equal maxima and v of one sign (biased rounding grows in training
// although every single error is small).
#include "harness/standard.h"
#include "support.h"

namespace tilewise {
namespace {

struct Signed {
  double mean = 0, rms = 0;
};

// Errors relative to the largest reference value.
Signed signed_errors(const std::vector<double>& values, const std::vector<double>& reference) {
  Signed result;
  double most = 0;
  for (size_t n = 0; n < values.size(); ++n) {
    const double error = values[n] - reference[n];
    result.mean += error;
    result.rms += error * error;
    most = std::max(most, std::abs(reference[n]));
  }
  const double count = static_cast<double>(values.size());
  result.mean /= count * most;
  result.rms = std::sqrt(result.rms / count) / most;
  return result;
}

TEST(Statistics, ErrorsHaveNoSide) {
  for (const char* dtype : {"f32", "f16", "bf16"})
    for (const char* pass : {"fwd", "bwd"}) {
      const std::string text = std::string(pass) + " " + dtype + " b=1 hq=24 sq=512 sk=64 d=16";
      InputOptions options;
      options.kind = InputKind::kLowrank;
      InputOptions exact_options = options;
      exact_options.float32_outputs = true;
      const auto prepare = [&](const InputOptions& o) {
        auto inputs = make_inputs(text, o);
        for (int64_t j = 1; j < 64; j += 2)  // every key twice: every row has its maximum at two keys at least
          for (int64_t h = 0; h < 24; ++h)
            for (int64_t c = 0; c < 16; ++c) inputs->k.set(inputs->k_row(0, j, h) * 16 + c, inputs->k.get(inputs->k_row(0, j - 1, h) * 16 + c));
        if (inputs->problem().pass == TW_BACKWARD) {  // o and lse of the keys as they are now
          auto forward = make_inputs(inputs->forward_problem(), options);
          forward->k = inputs->k;
          run_ok(*forward, "reference");
          inputs->set_forward(forward->o.values(), forward->lse.values());
        }
        return inputs;
      };
      const auto exact = prepare(exact_options);
      run_ok(*exact, "reference");
      // Half an ulp of the type; 24 * 512 * 16 errors average to a thousandth of it. In float32 a lean of half of that is
      // the exponential's and the reciprocal's own, and of no consequence.
      const double limit = std::string(dtype) == "f32" ? 0.5 * 0x1p-24 : 0.06 * (std::string(dtype) == "f16" ? 0x1p-11 : 0x1p-8);
      for (const std::string& row : rows_for(text)) {
        // Not promised of float32 on tensor cores, which cut their sums: docs/numerics.md has the lean.
        if (std::string(dtype) == "f32" && on_device_of(row, exact->problem()).device == TW_CUDA) continue;
        const auto inputs = prepare(options);
        run_ok(*inputs, row);
        const bool forward = inputs->problem().pass == TW_FORWARD;
        const Signed errors = forward ? signed_errors(inputs->o.values(), exact->o.values()) : signed_errors(inputs->dq.values(), exact->dq.values());
        EXPECT_LT(std::abs(errors.mean), limit) << row << ": mean signed error " << errors.mean << ", rms " << errors.rms << "\n  in \"" << text << "\"";
      }
    }
}

}  // namespace
}  // namespace tilewise
