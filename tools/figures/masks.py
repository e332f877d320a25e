"""Who sees whom, as the library says it: attention with k = 0 gives every visible key the same probability, and with
one-hot values the output *is* the row of probabilities. So each picture shows what a kernel did, not what a formula says."""

import numpy as np
import style
import tilewise


def one_hot(count: int) -> np.ndarray:
  return np.eye(count, dtype=np.float32)


def seen(sq: int, sk: int, **options) -> list[list[bool]]:
  """[sq, sk]: does row i see key j?"""
  rows = []
  for begin in range(0, sk, 256):  # value columns end at 256
    count = min(256, sk - begin)
    v = np.zeros((1, sk, 1, count), np.float32)
    v[0, begin:begin + count, 0] = one_hot(count)
    rows.append(tilewise.attention(np.zeros((1, sq, 1, 16), np.float32), np.zeros((1, sk, 1, 16), np.float32), v, **options)[0, :, 0])
  return (np.concatenate(rows, axis=1) > 0).tolist()


def shapes() -> dict:
  rng = np.random.default_rng(3)
  boolean = rng.random((8, 8)) < 0.55
  return {
      "full": seen(8, 8),
      "causal": seen(8, 8, causal=True),
      "causal, sq = 5 < sk = 8": seen(5, 8, causal=True),
      "causal, sq = 8 > sk = 5": seen(8, 5, causal=True),
      "window (2, 1)": seen(8, 8, window=(2, 1)),
      "causal, window (2, 0)": seen(8, 8, causal=True, window=(2, 0)),
      "window (2, 0), sq = 5, sk = 8": seen(5, 8, window=(2, 0)),
      "window (-1, 2): no left bound": seen(8, 8, window=(-1, 2)),
      "boolean mask": seen(8, 8, bias=boolean),
      "the same, causal": seen(8, 8, bias=boolean, causal=True),
  }


def draw_shapes(data):
  figure, axes = style.panels(2, 5, 3.9)
  for one, (title, matrix) in zip(axes.flat, data.items()):
    style.matrix(one, matrix, title.replace(", sq", ",\nsq").replace(": no", ":\nno").replace(", window", ",\nwindow"))
    one.title.set_fontsize(8.5)
  return figure


def packed() -> dict:
  """Three sequences one behind the other, one of them empty; with seqused_k; dense with left padding in a cache."""
  cu = np.int32([0, 3, 3, 8, 10])
  q, k = np.zeros((10, 1, 16), np.float32), np.zeros((10, 1, 16), np.float32)
  plain = tilewise.attention_varlen(q, k, one_hot(10)[:, None], cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
  used = np.int32([2, 0, 3, 2])
  holes = tilewise.attention_varlen(q, k, one_hot(10)[:, None], cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_q=used, seqused_k=used, causal=True)
  cache = np.tile(one_hot(8)[None, :, None], (3, 1, 1, 1))
  lengths, left = np.int32([8, 5, 6]), np.int32([0, 0, 3])
  rows = tilewise.attention_with_kvcache(np.zeros((3, 2, 1, 16), np.float32), np.zeros((3, 8, 1, 16), np.float32), cache,
                                         cache_seqlens=lengths, cache_leftpad=left, causal=True)
  return {"packed": (plain[:, 0] > 0).tolist(), "holes": (holes[:, 0] > 0).tolist(), "cu": cu.tolist(),
          "cache": (rows[:, :, 0] > 0).reshape(6, 8).tolist(), "lengths": lengths.tolist(), "left": left.tolist()}


def draw_packed(data):
  figure, (one, two, three) = style.panels(1, 3, 3.0)
  style.matrix(one, data["packed"], "packed: lengths 3, 0, 5, 2; causal", "row of q", "row of k")
  style.matrix(two, data["holes"], "seqused_q, seqused_k = 2, 0, 3, 2", "row of q", "row of k")
  for axes in (one, two):
    for edge in data["cu"][1:-1]:
      axes.plot([0, 10], [edge, edge], color=style.ORANGE, linewidth=1)
      axes.plot([edge, edge], [0, 10], color=style.ORANGE, linewidth=1)
  style.matrix(three, data["cache"], "cache of 8: seqused_k = 8, 5, 6,\nleftpad_k = 0, 0, 3; two queries each", "entry, query", "place in the cache")
  for edge in (2, 4):
    three.plot([0, 8], [edge, edge], color=style.ORANGE, linewidth=1)
  return figure


TABLE = np.int32([[4, 1, 6], [2, 5, 0]])
USED = np.int32([10, 7])


def paged() -> dict:
  """Which places of 8 pages of 4 keys each of two entries reads."""
  v = one_hot(32).reshape(8, 4, 1, 32)
  o = tilewise.attention_with_kvcache(np.zeros((2, 1, 1, 16), np.float32), np.zeros((8, 4, 1, 16), np.float32), v, page_table=TABLE,
                                      cache_seqlens=USED)
  return {"places": (o.reshape(2, 8, 4) > 0).tolist(), "table": TABLE.tolist(), "used": USED.tolist()}


def draw_paged(data):
  figure, axes = style.panels(1, 1, 2.9)
  colours = (style.BLUE, style.ORANGE)
  axes.set(xlim=(-0.2, 40), ylim=(9.8, -0.4))
  axes.axis("off")
  for page in range(8):
    axes.text(page * 5 + 2, 5.75, f"page {page}", ha="center", color=style.GREY)
    for slot in range(4):
      owner = [n for n in (0, 1) if data["places"][n][page][slot]]
      style.squares(axes, [(4.1, page * 5 + slot)], colours[owner[0]] if owner else style.HIDDEN)
  for entry, top, arrow, tip in ((0, 0.2, 1.25, 4.0), (1, 8.4, 8.3, 6.0)):  # the entries as they see themselves, above and below
    axes.text(0, top + 0.65, f"entry {entry}: page_table = {data['table'][entry]}, seqused_k = {data['used'][entry]}", color=colours[entry])
    for index, page in enumerate(data["table"][entry]):
      x = 22 + index * 5
      for slot in range(4):
        used = index * 4 + slot < data["used"][entry]
        style.squares(axes, [(top, x + slot)], colours[entry] if used else style.HIDDEN)
      if index * 4 < data["used"][entry]:
        axes.annotate("", xy=(page * 5 + 2, tip), xytext=(x + 2, arrow), arrowprops={"arrowstyle": "->", "color": colours[entry], "linewidth": 1})
  return figure


def groups() -> dict:
  """For each query head the key head whose values it got."""
  found = {}
  for name, hk in (("MHA: hq = hk = 8", 8), ("GQA: hq = 8, hk = 2", 2), ("MQA: hq = 8, hk = 1", 1)):
    v = np.zeros((1, 4, hk, 8), np.float32)
    v[:, :, range(hk), range(hk)] = 1
    o = tilewise.attention(np.zeros((1, 1, 8, 16), np.float32), np.zeros((1, 4, hk, 16), np.float32), v)
    found[name] = o[0, 0].argmax(axis=1).tolist()
  return found


def draw_groups(data):
  figure, axes = style.panels(1, 3, 1.7)
  colours = [style.BLUE, style.ORANGE, style.GREEN, style.PINK, style.SKY, style.YELLOW, "#444444", "#999999"]
  for one, (title, heads) in zip(axes, data.items()):
    hk = max(heads) + 1
    one.set(xlim=(-2.6, 8), ylim=(3.3, -0.3), title=title)
    one.axis("off")
    one.text(-0.3, 0.55, "q heads", ha="right", va="center", color=style.GREY)
    one.text(-0.3, 2.55, "k, v heads", ha="right", va="center", color=style.GREY)
    for head, key in enumerate(heads):
      place = (key + 0.5) * 8 / hk
      style.squares(one, [(0, head)], colours[key])
      one.plot([head + 0.5, place], [1.0, 2.0], color=colours[key], linewidth=1)
      style.squares(one, [(2, place - 0.5)], colours[key])
  return figure


def alibi() -> dict:
  """s_ij = log P_ij + lse_i of q = 0: what ALiBi alone puts on the scores."""
  def scores(sq, sk, slope, **options):
    q, k = np.zeros((1, sq, 1, 16), np.float32), np.zeros((1, sk, 1, 16), np.float32)
    o, lse = tilewise.attention(q, k, one_hot(sk)[None, :, None], alibi_slopes=np.float32([slope]), return_lse=True, **options)
    with np.errstate(divide="ignore"):
      s = np.log(o[0, :, 0]) + lse[0, 0][:, None]
    return np.where(np.isfinite(s), np.round(s, 3) + 0.0, -99).tolist()  # -99: not seen
  return {"slope 1/4, causal": scores(16, 16, 0.25, causal=True), "slope 1/4, full": scores(16, 16, 0.25),
          "slope 1/4, sq = 8, sk = 16": scores(8, 16, 0.25), "slope 1/16, full": scores(16, 16, 0.0625)}


def draw_alibi(data):
  figure, axes = style.panels(1, 4, 2.2)
  for one, (title, scores) in zip(axes, data.items()):
    s = np.ma.masked_less(np.array(scores), -90)
    image = one.imshow(np.ma.array(np.kron(s.data, np.ones((6, 6))), mask=np.kron(s.mask, np.ones((6, 6)))) if s.mask.any()
                       else np.kron(s.data, np.ones((6, 6))), cmap="Blues_r", vmin=-4, vmax=0, interpolation="none",
                       extent=(0, len(scores[0]), len(scores), 0))
    style.frame(one, len(scores), len(scores[0]), title)
    one.set_facecolor(style.HIDDEN)
    one.title.set_fontsize(8.5)
  bar = figure.colorbar(image, ax=axes, shrink=0.75, pad=0.02)
  bar.set_label("added to s", color=style.GREY)
  bar.outline.set_visible(False)
  return figure


def dropout() -> dict:
  q, k = np.zeros((1, 64, 1, 16), np.float32), np.zeros((1, 128, 1, 16), np.float32)
  kept = {}
  for p, offset in ((0.1, 0), (0.5, 0), (0.5, 1)):
    _, mask = tilewise.attention(q, k, np.zeros((1, 128, 1, 16), np.float32), dropout_p=p, dropout_seed=7, dropout_offset=offset,
                                 return_dropout_mask=True)
    kept[f"p = {p}, seed 7, offset {offset}"] = np.packbits(mask[0, 0].astype(bool), axis=1).tolist()
  return kept


def draw_dropout(data):
  figure, axes = style.panels(1, 3, 2.0)
  for one, (title, rows) in zip(axes, data.items()):
    kept = np.unpackbits(np.uint8(rows), axis=1).astype(bool)
    one.imshow(np.kron(kept, np.ones((3, 3))), cmap=style.matplotlib.colors.ListedColormap([style.HIDDEN, style.BLUE]), vmin=0, vmax=1,
               interpolation="none", extent=(0, 128, 64, 0))
    style.frame(one, 64, 128, f"{title}:\n{100 * kept.mean():.1f} % kept")
    one.title.set_fontsize(8.5)
  return figure


def boundary() -> dict:
  """Blocks of 96 x 256, as the CPU's plan has them: how much of each is visible."""
  data = {}
  for name, options in (("causal", {"causal": True}), ("causal, window (255, 0)", {"causal": True, "window": (255, 0)})):
    visible = np.array(seen(1536, 1536, **options))
    shares = [[visible[i:i + 96, j:j + 256].mean() for j in range(0, 1536, 256)] for i in range(0, 1536, 96)]
    data[name] = [["hidden" if share == 0 else "whole" if share == 1 else "edge" for share in row] for row in shares]
  return data


def draw_boundary(data):
  figure, axes = style.panels(1, 2, 3.4)
  colours = {"hidden": style.HIDDEN, "whole": style.BLUE, "edge": style.ORANGE}
  words = {"hidden": "hidden: skipped", "whole": "visible: plain tiles", "edge": "crossed by an edge: general tiles along it"}
  for one, (title, kinds) in zip(axes, data.items()):
    for kind, colour in colours.items():
      style.squares(one, [(i, j) for i, row in enumerate(kinds) for j, what in enumerate(row) if what == kind], colour, 0.03)
    counts = {kind: sum(row.count(kind) for row in kinds) for kind in colours}
    style.frame(one, len(kinds), len(kinds[0]), f"{title}:\n{counts['whole']} blocks visible, {counts['edge']} crossed, {counts['hidden']} skipped",
                "1536 queries, 96 to a block", "1536 keys, 256 to a block")
    one.set_aspect(96 / 256)
  handles = [style.plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
  figure.legend(handles, words.values(), loc="outside lower center", ncols=3, fontsize=8.5)
  return figure


FIGURES = {
    "masks": (shapes, draw_shapes),
    "packed": (packed, draw_packed),
    "paged": (paged, draw_paged),
    "groups": (groups, draw_groups),
    "alibi": (alibi, draw_alibi),
    "dropout": (dropout, draw_dropout),
    "blocks": (boundary, draw_boundary),
}
