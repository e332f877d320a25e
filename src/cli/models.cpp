#include "cli/models.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

namespace tilewise::cli {
namespace {

int64_t integer(const nlohmann::json& config, const std::string& path, const char* key, int64_t absent) {
  const auto found = config.find(key);
  if (found == config.end() || found->is_null()) {
    if (absent >= 0) return absent;
    throw UsageError("--config: \"" + path + "\": lacks " + key);
  }
  if (!found->is_number_integer() || found->get<int64_t>() < 0 || found->get<int64_t>() > (int64_t{1} << 32))
    throw UsageError("--config: \"" + path + "\": " + key + " " + found->dump() + ": must be an integer >= 0");
  return found->get<int64_t>();
}

// Which layers of a model with a window see everything: said layer by layer, else every n-th, else from one layer on.
int64_t full_layers(const nlohmann::json& config, const std::string& path, const std::string& type, int64_t layers) {
  if (const auto types = config.find("layer_types"); types != config.end() && types->is_array())
    return std::count(types->begin(), types->end(), "full_attention");
  const int64_t usual = type == "gemma2" ? 2 : type == "gemma3" || type == "gemma3_text" ? 6 : 0;  // their configurations leave it out
  const int64_t pattern = integer(config, path, config.contains("_sliding_window_pattern") ? "_sliding_window_pattern" : "sliding_window_pattern", usual);
  if (pattern > 0) return layers / pattern;
  return std::min(integer(config, path, "max_window_layers", 0), layers);  // the first ones, of Qwen 2 and 3
}

}  // namespace

int64_t windowed_layers(const tw_model& model, int64_t layers) {
  return model.window == 0 || model.layers == 0 ? 0 : layers * (model.layers - model.layers_full) / model.layers;
}

tw_model model_named(const std::string& name) {
  std::string names;
  for (int32_t n = 0; n < tw_model_count(); ++n) {
    tw_model model{};
    model.struct_size = sizeof model;
    detail::require(tw_model_at(n, &model));
    if (name == model.name) return model;
    names += std::string(names.empty() ? "" : ", ") + model.name;
  }
  throw UsageError("--model: \"" + name + "\": must be one of " + names);
}

tw_model model_of_config(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw UsageError("--config: \"" + path + "\": cannot be read");
  const nlohmann::json whole = nlohmann::json::parse(file, nullptr, false);
  if (!whole.is_object()) throw UsageError("--config: \"" + path + "\": is no JSON object");
  // Models that also see or hear keep the language model's part by itself.
  const auto text = whole.find("text_config");
  const nlohmann::json& config = text != whole.end() && text->is_object() ? *text : whole;
  tw_model model{};
  model.struct_size = sizeof model;
  const std::string type = config.value("model_type", "config");
  std::snprintf(model.name, sizeof model.name, "%s", type.c_str());
  const auto key = [&](const char* name, const char* old) {
    return config.contains(old) ? old : name;
  };  // GPT-2's names
  model.hidden_size = integer(config, path, key("hidden_size", "n_embd"), -1);
  model.layers = integer(config, path, key("num_hidden_layers", "n_layer"), -1);
  model.num_heads_q = integer(config, path, key("num_attention_heads", "n_head"), -1);
  if (model.num_heads_q == 0) throw UsageError("--config: \"" + path + "\": num_attention_heads 0: must be >= 1");
  model.num_heads_k = integer(config, path, "num_key_value_heads", model.num_heads_q);
  model.head_dim = integer(config, path, "head_dim", model.hidden_size / model.num_heads_q);
  model.head_dim_v = model.head_dim;
  if (config.contains("qk_nope_head_dim")) {  // multi-head latent attention, as it runs in prefill and training
    model.head_dim = integer(config, path, "qk_nope_head_dim", -1) + integer(config, path, "qk_rope_head_dim", 0);
    model.head_dim_v = integer(config, path, "v_head_dim", model.head_dim);
    model.num_heads_k = model.num_heads_q;
  }
  model.window = config.value("use_sliding_window", true) ? integer(config, path, "sliding_window", 0) : 0;
  model.layers_full = model.window == 0 ? model.layers : full_layers(config, path, type, model.layers);
  const auto cap = config.find("attn_logit_softcapping");
  model.softcap = cap != config.end() && cap->is_number() ? cap->get<double>() : 0;
  model.sink = type == "gpt_oss";
  return model;
}

std::string problem_of_model(const tw_model& m, const ModelShape& shape) {
  std::string text = fmt::format("{} {}{} b={} hq={}", shape.pass, shape.dtype, shape.device == "cuda" ? " cuda" : "",
                                 shape.batch, m.num_heads_q);
  if (m.num_heads_k != m.num_heads_q) text += fmt::format(" hk={}", m.num_heads_k);
  text += shape.decode ? fmt::format(" sq=1 sk={}", shape.seqlen) : fmt::format(" sq={}", shape.seqlen);
  text += fmt::format(" d={}", m.head_dim);
  if (m.head_dim_v != m.head_dim) text += fmt::format(" dv={}", m.head_dim_v);
  text += " causal";
  if (m.window > 0 && m.layers_full == 0) text += fmt::format(" window={},0", m.window - 1);
  if (m.softcap > 0) text += fmt::format(" softcap={}", m.softcap);
  if (m.sink) text += " sink";
  if (shape.decode) text += " seqused_k";
  return text;
}

}  // namespace tilewise::cli
