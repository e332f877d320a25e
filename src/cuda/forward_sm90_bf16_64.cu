// Rows of forward_sm90: bfloat16, head dims up to 64.
#include "cuda/launch_forward_sm90.cuh"

namespace tilewise::cuda {

template int launch_forward_sm90<Element::kBfloat16, Sm90Shape::kD64, RowSum::kFloat32>(const ForwardSm90Params&, int, void*);
template int launch_forward_sm90<Element::kBfloat16, Sm90Shape::kD64, RowSum::kOnesColumn>(const ForwardSm90Params&, int, void*);
template int launch_forward_sm90<Element::kBfloat16, Sm90Shape::kD64Short, RowSum::kFloat32>(const ForwardSm90Params&, int, void*);
template int launch_forward_sm90<Element::kBfloat16, Sm90Shape::kD64Causal, RowSum::kFloat32>(const ForwardSm90Params&, int, void*);
template int launch_forward_sm90<Element::kBfloat16, Sm90Shape::kD64Short, RowSum::kOnesColumn>(const ForwardSm90Params&, int, void*);
template int launch_forward_sm90<Element::kBfloat16, Sm90Shape::kD64Causal, RowSum::kOnesColumn>(const ForwardSm90Params&, int, void*);

}  // namespace tilewise::cuda
