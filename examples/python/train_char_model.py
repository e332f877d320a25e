"""Trains a tiny character model twice from the same start, once with standard attention and once with Tilewise: the two
loss curves are the same curve. About half a minute on two cores. Needs torch.

    python train_char_model.py [--steps 60] [--save model.pt]
"""

import argparse
import os
import time

import torch
import torch.nn.functional as F

import tilewise.torch

TEXT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "moby_dick_chapter_1.txt")
WIDTH, HEADS, KEY_HEADS, LAYERS, CONTEXT = 64, 4, 2, 2, 96


def standard_attention(q, k, v):
    """softmax(q k^T / sqrt(d)) v with a causal mask: a matrix of CONTEXT x CONTEXT for every head."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def tiled_attention(q, k, v):
    return tilewise.torch.attention(q, k, v, causal=True)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, WIDTH * (HEADS + 2 * KEY_HEADS) // HEADS)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, attention):
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, WIDTH // HEADS))
        q, k, v = heads.split((HEADS, KEY_HEADS, KEY_HEADS), 2)  # views: no copy
        x = x + self.out(attention(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharModel(torch.nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.characters = torch.nn.Embedding(vocabulary, WIDTH)
        self.positions = torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, vocabulary)

    def forward(self, ids, attention):
        x = self.characters(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, attention)
        return self.head(x)


def load_text():
    with open(TEXT, encoding="utf-8") as file:
        text = file.read()
    alphabet = sorted(set(text))
    return torch.tensor([alphabet.index(c) for c in text]), alphabet


def train(attention, steps, seed=0):
    """-> (model, losses)"""
    ids, alphabet = load_text()
    torch.manual_seed(seed)
    model = CharModel(len(alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(ids) - CONTEXT - 1, (16,), generator=generator)
        batch = torch.stack([ids[s : s + CONTEXT + 1] for s in starts])
        logits = model(batch[:, :-1], attention)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save", help="write the model trained with Tilewise here")
    arguments = parser.parse_args()
    curves = {}
    for name, attention in (("standard", standard_attention), ("tilewise", tiled_attention)):
        start = time.perf_counter()
        model, curves[name] = train(attention, arguments.steps)
        print("%s: loss %.4f -> %.4f in %.1f s" % (name, curves[name][0], curves[name][-1], time.perf_counter() - start))
    for step in range(0, arguments.steps, max(1, arguments.steps // 10)):
        print("step %3d  standard %.5f  tilewise %.5f" % (step, curves["standard"][step], curves["tilewise"][step]))
    apart = max(abs(a - b) for a, b in zip(curves["standard"], curves["tilewise"]))
    print("largest difference of the two curves: %.2g" % apart)
    if arguments.save:
        torch.save({"state": model.state_dict(), "alphabet": load_text()[1]}, arguments.save)
    if not (curves["tilewise"][-1] < curves["tilewise"][0] and apart < 1e-2):
        raise SystemExit("the curves differ, or the loss did not fall")


if __name__ == "__main__":
    main()
