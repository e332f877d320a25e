// Rows of forward_sm90: float16, head dims up to 256.
#include "cuda/launch_forward_sm90.cuh"

namespace tilewise::cuda {

template int launch_forward_sm90<Element::kFloat16, Sm90Shape::kD256, RowSum::kFloat32>(const ForwardSm90Params&, int, void*);

}  // namespace tilewise::cuda
