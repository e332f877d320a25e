#include "core/problem.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/dtype.h"

namespace tilewise {
namespace {

struct IntegerKey {
  const char* key;
  int64_t tw_problem::* member;
};
constexpr IntegerKey kShapeKeys[] = {
    {"b", &tw_problem::batch},     {"hq", &tw_problem::num_heads_q}, {"hk", &tw_problem::num_heads_k},
    {"sq", &tw_problem::seqlen_q}, {"sk", &tw_problem::seqlen_k},    {"d", &tw_problem::head_dim},
    {"dv", &tw_problem::head_dim_v}};
constexpr IntegerKey kLayoutKeys[] = {{"cache_batch", &tw_problem::cache_batch}, {"new", &tw_problem::seqlen_new}};

struct RealKey {
  const char* key;
  double tw_problem::* member;
  double absent;
};
constexpr RealKey kRealKeys[] = {{"scale", &tw_problem::softmax_scale, std::numeric_limits<double>::quiet_NaN()},
                                 {"softcap", &tw_problem::softcap, 0},
                                 {"dropout", &tw_problem::dropout_p, 0}};

struct FlagKey {
  const char* key;
  uint32_t feature;
};
constexpr FlagKey kFeatureKeys[] = {
    {"sink", TW_HAS_SINK},           {"seqused_q", TW_HAS_SEQUSED_Q},
    {"seqused_k", TW_HAS_SEQUSED_K}, {"cache_batch_idx", TW_HAS_CACHE_BATCH_IDX},
    {"leftpad", TW_HAS_LEFTPAD_K},   {"rotary_seqlens", TW_HAS_ROTARY_SEQLENS},
    {"rng_state", TW_HAS_RNG_STATE}, {"dropout_mask", TW_HAS_DROPOUT_MASK},
    {"maxlogit", TW_HAS_MAX_LOGIT},  {"dlse", TW_HAS_DLSE},
    {"dbias", TW_HAS_DBIAS},         {"dalibi", TW_HAS_DALIBI},
    {"dsink", TW_HAS_DSINK}};
constexpr FlagKey kDefaultKeys[] = {  // present unless said otherwise: lse in fwd, dq dk dv in bwd
    {"no_lse", TW_HAS_LSE}, {"no_dq", TW_HAS_DQ}, {"no_dk", TW_HAS_DK}, {"no_dv", TW_HAS_DV}};

uint32_t default_features(int32_t pass) {
  return pass == TW_FORWARD ? uint32_t{TW_HAS_LSE} : uint32_t{TW_HAS_DQ | TW_HAS_DK | TW_HAS_DV};
}

constexpr char kDimLetters[] = "bhqk";

std::string dims_text(int32_t dims) {
  std::string text;
  for (int n = 0; n < 4; ++n)
    if (dims >> n & 1) text += kDimLetters[n];
  return text.empty() ? "1" : text;
}

int32_t dims_from_text(std::string_view text) {  // -1 if it is none
  if (text == "1") return 0;
  int32_t dims = 0;
  for (char letter : text) {
    const char* at = std::strchr(kDimLetters, letter);
    if (at == nullptr || letter == 0) return -1;
    dims |= 1 << (at - kDimLetters);
  }
  return text.empty() ? -1 : dims;
}

template <class Number>
bool read_number(std::string_view text, Number* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

std::string number_text(double value) {  // the shortest text that reads back as the same double
  char buffer[32];
  const auto result = std::to_chars(buffer, buffer + sizeof buffer, value);
  return std::string(buffer, result.ptr);
}

// One "key=value" or flag. Returns false if the key is unknown; an error if the value is wrong.
Status parse_token(std::string_view token, tw_problem* p) {
  const size_t equals = token.find('=');
  const std::string_view key = token.substr(0, equals);
  const std::string_view value = equals == std::string_view::npos ? std::string_view() : token.substr(equals + 1);
  const bool is_flag = equals == std::string_view::npos;
  const auto wrong = [&](const char* allowed) {
    return invalid("problem: \"", token, "\": ", key, " takes ", allowed);
  };
  if (is_flag) {
    for (const FlagKey& flag : kFeatureKeys)
      if (key == flag.key) return p->features |= flag.feature, Status();
    for (const FlagKey& flag : kDefaultKeys)
      if (key == flag.key) return p->features &= ~flag.feature, Status();
    if (key == "causal") return p->causal = 1, Status();
    if (key == "deterministic") return p->deterministic = 1, Status();
    if (key == "batch_invariant") return p->batch_invariant = 1, Status();
    if (key == "cuda") return p->device = TW_CUDA, Status();
    return invalid("problem: \"", token, "\" is no flag and no key=value; see tw_problem in tilewise.h");
  }
  for (const auto& keys : {std::vector<IntegerKey>(std::begin(kShapeKeys), std::end(kShapeKeys)),
                           std::vector<IntegerKey>(std::begin(kLayoutKeys), std::end(kLayoutKeys))})
    for (const IntegerKey& integer : keys)
      if (key == integer.key)
        return read_number(value, &(p->*integer.member)) ? Status() : wrong("an integer");
  for (const RealKey& real : kRealKeys)
    if (key == real.key) return read_number(value, &(p->*real.member)) ? Status() : wrong("a number");
  const size_t comma = value.find(',');
  const std::string_view before = value.substr(0, comma);
  const std::string_view after = comma == std::string_view::npos ? std::string_view() : value.substr(comma + 1);
  if (key == "window")
    return read_number(before, &p->window_left) && read_number(after, &p->window_right) ? Status()
                                                                                       : wrong("LEFT,RIGHT");
  if (key == "packed_q")
    return p->q_layout = TW_PACKED, read_number(value, &p->total_q) ? Status() : wrong("the number of packed rows");
  if (key == "packed_k")
    return p->k_layout = TW_PACKED, read_number(value, &p->total_k) ? Status() : wrong("the number of packed rows");
  if (key == "pages") {
    const size_t x = value.find('x');
    p->k_layout = TW_PAGED;
    return x != std::string_view::npos && read_number(value.substr(0, x), &p->num_pages) &&
                   read_number(value.substr(x + 1), &p->page_size)
               ? Status()
               : wrong("NUMBERxSIZE");
  }
  if (key == "rotary") {
    p->rotary_interleaved = after == "interleaved";
    return read_number(before, &p->rotary_dim) && (after.empty() || p->rotary_interleaved) ? Status()
                                                                                          : wrong("DIM[,interleaved]");
  }
  if (key == "alibi") {
    p->features |= TW_HAS_ALIBI;
    p->alibi_dims = dims_from_text(value);
    return p->alibi_dims == TW_DIM_H || p->alibi_dims == (TW_DIM_B | TW_DIM_H) ? Status() : wrong("h or bh");
  }
  if (key == "bias" || key == "mask") {
    const size_t colon = value.find(':');
    const bool is_mask = key == "mask";
    p->features |= TW_HAS_BIAS;
    p->bias_dtype = is_mask ? int32_t{TW_BOOL} : dtype_from_name(value.substr(0, colon));
    p->bias_dims = dims_from_text(is_mask ? value : colon == std::string_view::npos ? "" : value.substr(colon + 1));
    return p->bias_dims >= 0 && (is_mask || is_float(p->bias_dtype))
               ? Status()
               : wrong(is_mask ? "letters of bhqk, or 1" : "DTYPE:DIMS, as in f32:hqk");
  }
  if (key == "seed") return read_number(value, &p->dropout_seed) ? Status() : wrong("an unsigned integer");
  if (key == "offset") return read_number(value, &p->dropout_offset) ? Status() : wrong("an unsigned integer");
  if (key == "splits") return read_number(value, &p->num_splits) ? Status() : wrong("an integer");
  if (key == "sm_margin") return read_number(value, &p->sm_margin) ? Status() : wrong("an integer");
  return invalid("problem: \"", token, "\": ", key, " is no key; see tw_problem in tilewise.h");
}

// Query-key pairs that are visible, per (batch entry, query head).
double visible_pairs(const tw_problem& p) {
  const double sq = static_cast<double>(p.seqlen_q), sk = static_cast<double>(p.seqlen_k);
  const Mask mask = mask_of(p);
  if (mask.left < 0 && mask.right < 0) return sq * sk;
  if (mask.left < 0 && mask.right == 0 && p.seqlen_q == p.seqlen_k) return sq * sk / 2;  // the field's convention
  double pairs = 0;
  const int64_t step = std::max<int64_t>(1, p.seqlen_q / 4096);  // exact up to 4096 rows, sampled beyond
  for (int64_t i = 0; i < p.seqlen_q; i += step) {
    const KeyRange range = mask.keys(i, p.seqlen_q, p.seqlen_k);
    pairs += static_cast<double>(range.end - range.begin) * static_cast<double>(std::min(step, p.seqlen_q - i));
  }
  return pairs;
}

// Sequences in units of the longest one, so that packed totals count and not b times the longest.
double sequences(const tw_problem& p) {
  if (p.q_layout == TW_PACKED && p.seqlen_q > 0) return static_cast<double>(p.total_q) / static_cast<double>(p.seqlen_q);
  if (p.k_layout == TW_PACKED && p.seqlen_k > 0) return static_cast<double>(p.total_k) / static_cast<double>(p.seqlen_k);
  return static_cast<double>(p.batch);
}

}  // namespace

tw_problem default_problem() {
  tw_problem p;
  std::memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.window_left = p.window_right = -1;
  p.softmax_scale = std::numeric_limits<double>::quiet_NaN();
  return p;
}

std::string format(const tw_problem& p) {
  std::string text = p.pass == TW_FORWARD ? "fwd " : "bwd ";
  text += dtype_name(p.dtype);
  if (p.device == TW_CUDA) text += " cuda";
  const auto put = [&](const char* key, const auto& value) { text += concat(' ', key, '=', value); };
  const auto flag = [&](const char* key, bool on) {
    if (on) text += concat(' ', key);
  };
  put("b", p.batch);
  put("hq", p.num_heads_q);
  if (p.num_heads_k != p.num_heads_q) put("hk", p.num_heads_k);
  put("sq", p.seqlen_q);
  if (p.seqlen_k != p.seqlen_q) put("sk", p.seqlen_k);
  put("d", p.head_dim);
  if (p.head_dim_v != p.head_dim) put("dv", p.head_dim_v);
  if (p.q_layout == TW_PACKED) put("packed_q", p.total_q);
  if (p.k_layout == TW_PACKED) put("packed_k", p.total_k);
  if (p.k_layout == TW_PAGED) put("pages", concat(p.num_pages, 'x', p.page_size));
  for (const IntegerKey& integer : kLayoutKeys)
    if (p.*integer.member != 0) put(integer.key, p.*integer.member);
  if (p.rotary_dim != 0) put("rotary", concat(p.rotary_dim, p.rotary_interleaved ? ",interleaved" : ""));
  flag("causal", p.causal);
  if (p.window_left != -1 || p.window_right != -1) put("window", concat(p.window_left, ',', p.window_right));
  if (!std::isnan(p.softmax_scale)) put("scale", number_text(p.softmax_scale));
  if (p.softcap != 0) put("softcap", number_text(p.softcap));
  if (has(p, TW_HAS_ALIBI)) put("alibi", dims_text(p.alibi_dims));
  if (has(p, TW_HAS_BIAS))
    p.bias_dtype == TW_BOOL ? put("mask", dims_text(p.bias_dims))
                            : put("bias", concat(dtype_name(p.bias_dtype), ':', dims_text(p.bias_dims)));
  flag("sink", has(p, TW_HAS_SINK));
  if (p.dropout_p != 0) put("dropout", number_text(p.dropout_p));
  if (p.dropout_seed != 0) put("seed", p.dropout_seed);
  if (p.dropout_offset != 0) put("offset", p.dropout_offset);
  for (const FlagKey& key : kFeatureKeys)
    if (key.feature != TW_HAS_SINK) flag(key.key, p.features & key.feature);
  for (const FlagKey& key : kDefaultKeys)
    flag(key.key, default_features(p.pass) & ~p.features & key.feature);
  flag("deterministic", p.deterministic);
  flag("batch_invariant", p.batch_invariant);
  if (p.num_splits != 0) put("splits", p.num_splits);
  if (p.sm_margin != 0) put("sm_margin", p.sm_margin);
  return text;
}

Status parse(std::string_view text, tw_problem* problem) {
  std::vector<std::string_view> tokens;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = text.find_first_not_of(" \t\n", at);
    if (begin == std::string_view::npos) break;
    at = std::min(text.find_first_of(" \t\n", begin), text.size());
    tokens.push_back(text.substr(begin, at - begin));
  }
  tw_problem p = default_problem();
  if (tokens.size() < 2 || (tokens[0] != "fwd" && tokens[0] != "bwd"))
    return invalid("problem: \"", text, "\" must begin with fwd or bwd and a dtype, as in \"fwd f32 b=1 hq=8 sq=512 d=64\"");
  p.pass = tokens[0] == "fwd" ? TW_FORWARD : TW_BACKWARD;
  p.dtype = dtype_from_name(tokens[1]);
  if (!is_float(p.dtype)) return invalid("problem: dtype \"", tokens[1], "\": must be f32, f16, bf16 or f64");
  p.features = default_features(p.pass);
  p.num_heads_k = p.seqlen_k = p.head_dim_v = -1;
  p.batch = p.num_heads_q = p.seqlen_q = p.head_dim = -1;
  for (size_t n = 2; n < tokens.size(); ++n) TW_RETURN_IF_ERROR(parse_token(tokens[n], &p));
  if (p.batch == -1) p.batch = 1;
  for (const IntegerKey& required : {kShapeKeys[1], kShapeKeys[3], kShapeKeys[5]})
    if (p.*required.member == -1) return invalid("problem: \"", text, "\" lacks ", required.key, "=");
  if (p.num_heads_k == -1) p.num_heads_k = p.num_heads_q;
  if (p.seqlen_k == -1) p.seqlen_k = p.seqlen_q;
  if (p.head_dim_v == -1) p.head_dim_v = p.head_dim;
  *problem = p;
  return Status();
}

bool operator==(const tw_problem& a, const tw_problem& b) { return format(a) == format(b); }

double softmax_scale_of(const tw_problem& p) {
  if (!std::isnan(p.softmax_scale)) return p.softmax_scale;
  return p.head_dim > 0 ? 1 / std::sqrt(static_cast<double>(p.head_dim)) : 1;
}

int64_t query_rows(const tw_problem& p) { return p.q_layout == TW_PACKED ? p.total_q : p.batch * p.seqlen_q; }
int64_t key_rows(const tw_problem& p) { return p.k_layout == TW_PACKED ? p.total_k : p.batch * p.seqlen_k; }

double flops(const tw_problem& p) {
  const double per_pair = 2.0 * static_cast<double>(p.head_dim + p.head_dim_v);
  const double forward = per_pair * visible_pairs(p) * sequences(p) * static_cast<double>(p.num_heads_q);
  return p.pass == TW_FORWARD ? forward : 2.5 * forward;
}

double bytes_moved(const tw_problem& p) {
  const double q = static_cast<double>(query_rows(p) * p.num_heads_q), k = static_cast<double>(key_rows(p) * p.num_heads_k);
  const double d = static_cast<double>(p.head_dim), dv = static_cast<double>(p.head_dim_v);
  const double element = static_cast<double>(dtype_size(p.dtype));
  const double forward = (q * (d + dv) + k * (d + dv)) * element + 4 * q;
  return p.pass == TW_FORWARD ? forward : forward + (q * (d + dv) + k * (d + dv)) * element;
}

}  // namespace tilewise
