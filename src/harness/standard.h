// Standard attention, the n x n matrix and all: the honest baseline of the tolerances, and in float64 an oracle that
// shares no code with the library.
#pragma once
#include <string>
#include <vector>

#include "harness/inputs.h"

namespace tilewise::harness {

enum class Arithmetic {
  kInType,   // float32 sums; scores, probabilities and their gradients rounded to the dtype of q, as in a framework that
             // composes matmul, softmax and matmul
  kFloat32,  // scores and probabilities stay in float32
  kOracle    // all in float64, nothing rounded: what the contract says
};

struct StandardResult {  // row-major in the tensors' own shapes; empty where the problem has no such output
  std::vector<double> o, lse, max_logit, dropout_mask;
  std::vector<double> dq, dk, dv, dbias, dalibi, dsink;
  std::vector<double> k, v;  // the cache after the append; empty without

  bool overflow = false;     // a finite score became infinite in the dtype: nothing to compare with
  std::vector<bool> seeing, seen;  // rows of q that see a key, rows of k that a query sees (with weight above 0)

  // The condition of the problem: how large the terms are that are summed, and may cancel.
  double max_score = 0;    // largest |s_ij| that is visible, before and after cap and bias
  struct Magnitudes {      // largest sum of absolute terms of an element of each output
    double o = 0, dq = 0, dk = 0, dv = 0, dbias = 0, dalibi = 0, dsink = 0;
  } magnitude;

  const std::vector<double>* output(const std::string& name) const;  // nullptr if there is no such name
  std::vector<double>* output(const std::string& name);
  double magnitude_of(const std::string& name) const;  // 0 for outputs that have none
};

// Outputs are rounded to the dtypes of the inputs' output buffers, except by the oracle. lse is never the poorer for the
// rounding of scores: it is that of float32 scores in kInType too.
StandardResult standard_attention(Inputs& inputs, Arithmetic arithmetic);

}  // namespace tilewise::harness
