"""The README's quick start in Python. Needs numpy and torch."""

import numpy as np
import torch

import tilewise

# NumPy: [batch, sequence, heads, head_dim]; 8 query heads share 2 key heads
rng = np.random.default_rng(0)
q = rng.standard_normal((2, 1024, 8, 64), dtype=np.float32)
k, v = rng.standard_normal((2, 2, 1024, 2, 64), dtype=np.float32)
o, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)

# torch: the same call, with gradients; any strides, no copies
qkv = torch.randn(2, 1024, 3, 8, 64, dtype=torch.bfloat16, requires_grad=True)
out = tilewise.attention(*qkv.unbind(2), causal=True, window=(255, 0))
out.float().square().mean().backward()

# unchanged models: put Tilewise behind torch's own attention
with tilewise.torch.sdpa():
    torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 8, 512, 64), is_causal=True)

print(tilewise.explain(q, k, v, causal=True))  # which kernel runs, and why
print("o", o.shape, "lse", lse.shape, "out", tuple(out.shape), "gradient", tuple(qkv.grad.shape))
