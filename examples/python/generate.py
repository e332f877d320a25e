"""Writes text with a character model, once by recomputing the whole context for every character and once with a KV cache
(attention_with_kvcache: one query, the new key and value appended in place). Both write the same characters. Needs torch.

    python train_char_model.py --save model.pt
    python generate.py [--model model.pt] [--prompt "Call me"] [--characters 60]

Without --model it trains one for a few seconds first.
"""

import argparse

import torch
from train_char_model import CONTEXT, HEADS, KEY_HEADS, LAYERS, WIDTH, CharModel, load_text, tiled_attention, train

import tilewise.torch


@torch.no_grad()
def recompute(model, ids, count):
    for _ in range(count):
        logits = model(ids, tiled_attention)
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
    return ids


@torch.no_grad()
def with_cache(model, ids, count):
    k_cache, v_cache = torch.empty(2, LAYERS, 1, CONTEXT, KEY_HEADS, WIDTH // HEADS)
    used = 0

    def forward(new):
        nonlocal used
        x = model.characters(new) + model.positions(torch.arange(used, used + new.shape[1]))
        for layer, block in enumerate(model.blocks):

            def cached(q, k, v):
                return tilewise.torch.attention_with_kvcache(
                    q, k_cache[layer], v_cache[layer], k, v, cache_seqlens=used, causal=True  # noqa: B023
                )

            x = block(x, cached)
        used += new.shape[1]
        return model.head(x[:, -1:])

    logits = forward(ids)
    for n in range(count):
        following = logits.argmax(-1)
        ids = torch.cat((ids, following), 1)
        if n + 1 < count:
            logits = forward(following)
    return ids


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--prompt", default="Call me")
    parser.add_argument("--characters", type=int, default=60)
    arguments = parser.parse_args()
    if arguments.model:
        saved = torch.load(arguments.model, weights_only=True)
        alphabet = saved["alphabet"]
        model = CharModel(len(alphabet))
        model.load_state_dict(saved["state"])
    else:
        model, _ = train(tiled_attention, steps=30)
        alphabet = load_text()[1]
    count = min(arguments.characters, CONTEXT - len(arguments.prompt))
    ids = torch.tensor([[alphabet.index(c) for c in arguments.prompt]])
    texts = ["".join(alphabet[i] for i in f(model, ids, count)[0]) for f in (recompute, with_cache)]
    print(texts[1])
    if texts[0] != texts[1]:
        raise SystemExit("the cache changed the text:\n%s" % texts[0])


if __name__ == "__main__":
    main()
