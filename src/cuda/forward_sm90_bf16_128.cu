// Rows of forward_sm90: bfloat16, head dims up to 128.
#include "cuda/launch_forward_sm90.cuh"

namespace tilewise::cuda {

template int launch_forward_sm90<Element::kBfloat16, Sm90Shape::kD128, RowSum::kFloat32>(const ForwardSm90Params&, int, void*);
template int launch_forward_sm90<Element::kBfloat16, Sm90Shape::kD128Short, RowSum::kFloat32>(const ForwardSm90Params&, int, void*);
template int launch_forward_sm90<Element::kBfloat16, Sm90Shape::kD128Short, RowSum::kOnesColumn>(const ForwardSm90Params&, int, void*);
template int launch_forward_sm90<Element::kBfloat16, Sm90Shape::kD128, RowSum::kOnesColumn>(const ForwardSm90Params&, int, void*);

}  // namespace tilewise::cuda
