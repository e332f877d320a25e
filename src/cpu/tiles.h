// The inner tiles of the CPU kernels, as a table of functions: one table per instruction set, one algorithm above them.
//
// All matrix products have one form, C[rows, columns] += A[rows, steps] * B[steps, columns], where A is broadcast
// element by element and B is read in panels of `panel` columns. The unit of the reduction dimension is a 4-byte lane:
// one float32, or (pairs) two bfloat16 that one dot-product instruction multiplies and adds.
//
//   rows    [n, steps]             A operand: q, dO                      pack_rows
//   keys    [steps, panel]         B operand, reduction over head_dim:   K^T, V^T of one panel of keys    pack_keys
//   values  [panels][n(/2), panel] B operand, reduction over rows:       V, K, Q, dO                      pack_values
//
// This header and tile_kernels.h hold plain structs and templates on the instruction set only: an inline function shared
// with other translation units could be emitted with AVX-512 code and then be chosen by the linker for everybody.
#pragma once
#include <cstdint>

#include "cpu/isa.h"

namespace tilewise {

struct Dropout;

constexpr int kStrip = 6;             // rows of a full tile: 6 x 4 accumulators + 4 of B + 1 of A fill 32 registers
constexpr int kMaxPanel = 64;         // columns of the widest panel
constexpr int kMaxPanelVectors = 4;
constexpr int kRowVariants = 4;       // tiles of 1, 2, 4 and 6 rows; 3 and 5 use the next larger
constexpr int kMaxLanes = 16;         // floats of the widest vector

constexpr int row_variant(int64_t rows) { return rows <= 1 ? 0 : rows <= 2 ? 1 : rows <= 4 ? 2 : 3; }

// What turns a raw product q.k into a logit, for one strip and one panel. Base-2 logits throughout.
struct LogitTile {
  const float* q;    // [rows, steps]; without k: the products q.k themselves, [rows, panel]
  int64_t ldq;
  const float* k;    // [steps, panel] or nullptr
  int64_t steps;
  float post;        // exponent = (t - max) * post; 1 unless q could not be scaled beforehand (pairs)
  // The general variant only:
  const int32_t* begin;   // [rows]: visible columns of this panel are [begin, end)
  const int32_t* end;
  bool modified;          // softcap, ALiBi or bias: t = addend + cap * tanh(pre * q.k / cap)
  bool mark_masked;       // masked probabilities become -0.0, so that accumulate_visible can skip them
  float pre;
  float softcap;          // in base 2; 0 = off
  const float* addend;    // [rows, panel] or nullptr
  const uint64_t* keep;   // dropout bits per row, `keep_stride` apart, or nullptr; column c is bit keep_shift + c
  int64_t keep_stride;
  int32_t keep_shift;
};

// Forward: logits of a strip -> unnormalised probabilities, with the running maximum and sum.
//
// The maximum is lazy: it moves only when a logit exceeds it by `slack` (2^8 in probability), so that ordinary tiles need
// no reduction across lanes and no rescaling. Exact for any slack, since softmax does not change when its logits shift.
struct ForwardTile : LogitTile {
  float* p;             // [rows, ldp] lanes, at this panel's first column
  int64_t ldp;
  int64_t p_written;    // columns to the left of `p` that share the maximum and shrink with it
  float* max;           // [rows]; 0 while limit is -inf
  float* limit;         // [rows]: max + slack; -inf while no key was seen
  float* sum;           // [rows, lanes]
  float* o;             // [rows, ldo]
  int64_t ldo;
  int64_t o_columns;
  float slack;
};

// Backward: logits -> probabilities from the saved lse. Always kStrip rows.
struct ProbabilityTile : LogitTile {
  const float* lse;        // [rows] in base 2; +inf gives 0
  float* probability;      // [rows, ld] float32, before dropout
  float* softcap_factor;   // [rows, ld]: 1 - tanh^2, if softcap
  int64_t ld;
  float* p;                // operand of dV: float32 [rows, ldp], or pairs [rows / 2, ldp]; after dropout (unscaled)
  int64_t ldp;
};

// Backward: dP = dO V^T -> dS = P * (dP - delta).
struct GradientTile {
  const float* dout;  // [rows, steps]
  int64_t ld_dout;
  const float* v;     // [steps, panel]
  int64_t steps;
  const float* probability;
  const float* softcap_factor;  // general variant; nullptr = none
  int64_t ld;
  const float* delta;           // [rows]
  float* ds;                    // operand of dK: float32 [rows, ld_ds], or pairs of rows [rows / 2, ld_ds]
  int64_t ld_ds;
  float* ds_rows;               // pairs only, operand of dQ: [rows, ld_ds_rows] pairs of keys
  int64_t ld_ds_rows;
  // general variant only
  float* ds_logit;              // [rows, ld] gradient of the logit after softcap (for dbias, dalibi), or nullptr
  const uint64_t* keep;
  int64_t keep_stride;
  int32_t keep_shift;
  float keep_scale;
  bool mark_masked;
};

// C[rows, columns] += A B with A(r, s) = a[r * row_stride + s * step_stride].
struct ProductTile {
  const float* a;
  int64_t row_stride, step_stride;  // one of them is 1
  const float* b;
  int64_t ldb;
  int64_t steps;
  float* c;
  int64_t ldc;
  bool resume;  // the sum goes on from C step by step, instead of being added to it as a whole
};

// Few query rows against rows of K or V where they lie, unpacked: for decoding, where every key is read once.
struct DirectTile {
  const void* const* keys;  // [n] rows of K or V
  int64_t n;
  int64_t head_dim;
  int32_t dtype;
  const float* a;           // scores: q [rows, lda], zero past head_dim.  values: P [rows, lda]
  int64_t lda;
  float* c;                 // scores: products [rows, ldc], n rounded up to whole vectors.  values: O [rows, ldc], added to
  int64_t ldc;
};

struct TileKernels {
  Isa isa;
  bool pairs;
  int lanes;          // floats per vector
  int panel_vectors;  // vectors per panel

  int panel() const { return lanes * panel_vectors; }

  // [general][row_variant][vectors - 1]
  void (*forward[2][kRowVariants][kMaxPanelVectors])(const ForwardTile&);
  void (*probability[2][kMaxPanelVectors])(const ProbabilityTile&);
  void (*gradient[2][kMaxPanelVectors])(const GradientTile&);
  // [step_stride != 1][row_variant][vectors - 1]
  void (*product[2][kRowVariants][kMaxPanelVectors])(const ProductTile&);

  // [row_variant]; `keys` of direct_scores is padded to whole vectors. float32 arithmetic; nullptr with pairs.
  void (*direct_scores[kRowVariants])(const DirectTile&);
  void (*direct_values[kRowVariants])(const DirectTile&);
  bool (*any_nonfinite)(const void* const* rows, int64_t n, int64_t head_dim, int32_t dtype);

  // Rows come as pointers (nullptr = zeros), so that strides, pages and padding end here. Each returns true if a value was
  // inf or NaN. `dtype` is a tw_dtype; head_dim in elements.
  bool (*pack_rows)(const void* const* rows, int64_t n, int64_t head_dim, int32_t dtype, float scale, float* out, int64_t ld);
  bool (*pack_keys)(const void* const* rows, int64_t head_dim, int32_t dtype, float* out);  // `panel` rows
  bool (*pack_values)(const void* const* rows, int64_t n, int64_t head_dim, int32_t dtype, float* out, int64_t panel_stride);
  void (*store_row)(const float* row, float scale, int64_t n, int32_t dtype, void* out);
  float (*dot_rows)(const void* a, const void* b, int64_t n, int32_t dtype);
  // Bits of 16 rows x 32 columns: bit c of bits[r] = keep(16 * row_block + r, 32 * col_block + c).
  void (*dropout_bits)(const Dropout& dropout, int64_t batch_head, int64_t row_block, int64_t col_block, uint32_t* bits);
};

const TileKernels& tiles_scalar();
const TileKernels& tiles_avx2();
const TileKernels& tiles_avx512();
const TileKernels& tiles_avx512bf16();

// C += A B where masked elements of A (bit pattern of -0.0) meet zeros instead of B: only for operands that hold inf or NaN,
// which a probability of zero must not spread (0 * NaN = NaN). The result is that of the ordinary tile on a B with zeros
// there, bit for bit.
void accumulate_visible(const TileKernels& kernels, const ProductTile& tile, int64_t rows, int64_t columns);

}  // namespace tilewise
