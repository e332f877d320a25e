// From a model's name or its Hugging Face config.json to a problem.
#pragma once
#include <string>

#include "cli/cli.h"

namespace tilewise::cli {

tw_model model_named(const std::string& name);      // of tw_model_at, else a UsageError that lists the names
tw_model model_of_config(const std::string& path);  // a config.json of transformers
int64_t windowed_layers(const tw_model& model, int64_t layers);  // of so many layers, in the model's proportion

struct ModelShape {
  int64_t batch = 1, seqlen = 4096;
  std::string pass = "bwd", dtype = "bf16", device = "cuda";
  bool decode = false;
};
std::string problem_of_model(const tw_model& model,
                             const ModelShape& shape);  // of a layer without window, if there is one

}  // namespace tilewise::cli
