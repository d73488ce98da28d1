// config_files.h: options in files: a model's config.json, a run's run.json and manifest, and what they mean for a
// resume. Used by the verbs in train_nsa.cu.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>

#include "checkpoint.h"
#include "../data/data_sets.h"
#include "../base/json.h"
#include "options.h"
#include "run_folder.h"
#include "../model/shape.h"
#include "tensor_files.h"
#include "../base/host.h"

// What the attention needs to know, for B sequences of T tokens.
NsaShape shape_of(const ModelConfig& c, int64_t B, int64_t T);

// The options that make the model, as its config.json.
std::string config_json(const ModelConfig& model);

// Reads a config.json into c, every field checked as the same option on the command line would be.
void read_config_json(Config& c, const std::string& path);

// verb: what cannot be done otherwise, "resume" or "begin".
void require_same_model(const ModelConfig& c, const std::string& checkpoint, const char* verb);

// All options of a run, as they are: paths to the byte.
std::string options_json(const Config& c);

// What the ranks of a run must have in common, a line each. train, val: fingerprints of the data; 0: there are none.
std::string same_run_lines(const Config& c, const std::string& program, uint64_t train, uint64_t val);

// Paths from the root, so that a later command finds them from wherever it is started.
Config with_absolute_paths(Config c);

// The options as run.json and the manifest keep them for a resume.
inline std::string manifest_json(const Config& c) { return options_json(with_absolute_paths(c)); }

// An option's value in a manifest, as on the command line.
std::string value_text(const Json& value, const Option& o);

// Nobody chose: the 0 of an option that counts from 1.
bool is_automatic(const Option& o, const std::string& value);

// A resume takes over every option of the run but those that name it or are for one start of the program. What --config
// gave is inherited itself.
bool is_inherited(const Option& o);

// --resume: what was not given is as in the run that is resumed. False where there is no such run.
bool inherit_options(Config& c);

// A training's options: to those given, those of the run that it resumes or the model that it begins with, and the
// preset's.
void complete_options(Config& c);

// --config: options from a file. Says which of them the command line overrides, if it is to print.
void read_options_file(Config& c, bool prints);

// What a resumed run says about itself.
void print_resume(const Config& c, const Checkpoint& checkpoint);

// --from and --step: the checkpoint they name.
Checkpoint chosen_checkpoint(const Config& c);

// Puts the options of the trained model in a checkpoint over those given, which say where the vocabulary is, what to
// sample and so on; but --seq-len and --branches stay, where they were given.
void read_trained_config(Config& c, const std::string& folder);

#ifndef COMPILED_APART  // see lib/cpu/kernels.cpp
#include "config_files.cpp"
#endif
