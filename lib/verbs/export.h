// export.h: the verbs export and import: a checkpoint as a folder that Hugging Face's transformers loads, and such a
// folder as a checkpoint again. Neither computes anything: the tensors are copied as they are. lib/report/hf/ holds the
// model in PyTorch, which goes with every export; the program carries those files in itself. Included by train_nsa.cu
// behind the model, for its list of tensors.
#pragma once
#include <cstdio>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../../tokenizer.h"
#include "../run/checkpoint.h"
#include "../run/config_files.h"
#include "../base/embed.h"
#include "../base/files.h"
#include "../base/json.h"
#include "../run/options.h"
#include "../run/run_folder.h"
#include "../base/safetensors.h"
#include "../run/tensor_files.h"
#include "../data/vocabulary.h"
#include "../report/model_card.h"
#include "trained_model.h"

// ---------------------------------------------------------------------------------------------------------------------
// The files of lib/report/hf/ within the program.

EMBED_FILE(modeling_nsa, "lib/report/hf/modeling_nsa.py")
EMBED_FILE(configuration_nsa, "lib/report/hf/configuration_nsa.py")

// ---------------------------------------------------------------------------------------------------------------------
// What transformers needs beside the tensors.

using TextFiles = std::vector<std::pair<std::string, std::string>>;  // name, text

// Our own config.json with the keys that transformers looks for.
inline std::string hf_config_json(const Config& c, int end_of_text) {
    std::string text = config_json(c);
    text.resize(text.rfind('}'));
    text +=
        ", \"model_type\": \"nsa\", \"architectures\": [\"NsaForCausalLM\"],\n \"auto_map\": {\"AutoConfig\": "
        "\"configuration_nsa.NsaConfig\", \"AutoModelForCausalLM\": \"modeling_nsa.NsaForCausalLM\"},\n ";
    return text + format_text("\"bos_token_id\": %d, \"eos_token_id\": %d, \"tie_word_embeddings\": %s}\n", end_of_text,
                              end_of_text, c.head == "tied" ? "true" : "false");
}

// What the files of both kinds of tokenizer say of it. A token that stands before and between documents serves as
// padding too: it is never trained to look back. longest: tokens that the model was trained on at a time.
inline std::string tokenizer_config_json(const char* type, const std::string& token, int64_t longest) {
    std::string text = std::string("{\"tokenizer_class\": \"") + type + "\"";
    for (const char* name : {"bos_token", "eos_token", "pad_token", "unk_token"})
        text += std::string(", \"") + name + "\": " + json_quote(token);
    return text +
           ", \"add_prefix_space\": false, \"model_input_names\": [\"input_ids\", \"attention_mask\"], "
           "\"padding_side\": "
           "\"left\", \"clean_up_tokenization_spaces\": false, \"model_max_length\": " +
           std::to_string(longest) + "}\n";
}

// For transformers without any code of ours. vocabulary, merges: as JSON; special: the token that no text makes;
// by_words: text is cut into GPT-2's pieces first.
inline std::string tokenizer_json(const std::string& vocabulary, const std::string& merges, const std::string& special,
                                  int id, bool by_words) {
    const std::string byte_level =
        "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, \"use_regex\": " +
        std::string(by_words ? "true" : "false") + "}";
    return "{\"version\": \"1.0\", \"truncation\": null, \"padding\": null,\n \"added_tokens\": [{\"id\": " +
           std::to_string(id) + ", \"content\": " + json_quote(special) +
           ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false, "
           "\"special\": true}],\n \"normalizer\": null, \"pre_tokenizer\": " +
           byte_level + ",\n \"post_processor\": null, \"decoder\": " + byte_level +
           ",\n \"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, \"continuing_subword_prefix\": "
           "null, \"end_of_word_suffix\": null, \"fuse_unk\": false, \"byte_fallback\": false, \"vocab\": " +
           vocabulary + ", \"merges\": [" + merges + "]}}\n";
}

// One token per byte, whose id is the byte, as a BPE without merges. Byte 0, which text does not contain and which
// stands before documents, is the special token.
inline TextFiles bytes_tokenizer_files(int64_t longest) {
    const ByteAlphabet alphabet;
    const std::string special(1, '\0');
    std::string vocabulary = "{" + json_quote(special) + ": 0";
    for (int b = 1; b < 256; b++)
        vocabulary += ", " + json_quote(alphabet.written(std::string(1, char(b)))) + ": " + std::to_string(b);
    return {
        {TOKENIZER_JSON, tokenizer_json(vocabulary + "}", "", special, 0, false)},
        {"tokenizer_config.json", tokenizer_config_json("PreTrainedTokenizerFast", special, longest)},
    };
}

// A vocabulary of GPT-2's kind under Hugging Face's names; this program reads them too, as --vocab-dir.
inline TextFiles tokenizer_files(const Tokenizer& t, int64_t longest) {
    if (t.is_bytes) return bytes_tokenizer_files(longest);
    const ByteAlphabet alphabet;
    std::string merges;
    for (const auto& [left, right] : t.halves_of)
        merges += (merges.empty() ? "" : ", ") +
                  json_quote(alphabet.written(t.tokens[left]) + " " + alphabet.written(t.tokens[right]));
    const std::string ids = ids_json(t.tokens);
    return {
        {"vocab.json", ids},
        {"merges.txt", merges_text(t.tokens, t.halves_of)},
        {TOKENIZER_JSON, tokenizer_json(ids.substr(0, ids.size() - 1), merges, t.tokens.back(), t.end_of_text, true)},
        {"tokenizer_config.json", tokenizer_config_json("GPT2Tokenizer", t.tokens.back(), longest)},
    };
}

// ---------------------------------------------------------------------------------------------------------------------
// The verbs.

// The tensors of a file in the order of a checkpoint. Neither one too few nor one too many.
inline std::vector<TensorView> find_tensors(const TensorList& table, const SafeTensors& file) {
    std::vector<TensorView> tensors;
    std::set<std::string> names;
    for (const TensorView& t : file.tensors)
        if (t.dtype != "F32")
            fail("%s: tensor %s has dtype %s, expected F32: save the model with model.float().save_pretrained(...)",
                 file.path, t.name, t.dtype);
    for (const TensorSpec& spec : table.specs) {
        tensors.push_back(file.get(spec.name, "F32", spec.shape()));
        names.insert(spec.name);
    }
    for (const TensorView& t : file.tensors)
        if (!names.count(t.name)) fail("%s: tensor %s is none of this model's", file.path, json_quote(t.name));
    return tensors;
}

inline void export_checkpoint(Config c) {
    const std::string to = c.out;
    const TrainedModel model = open_trained_model(c);
    const std::unique_ptr<Tokenizer> tokenizer = find_tokenizer(c);
    const TensorTable table(c);
    const std::vector<TensorView> tensors = find_tensors(table, *model.weights);
    TextFiles files = tokenizer_files(*tokenizer, c.seq_len);
    files.emplace_back("modeling_nsa.py", std::string(file_modeling_nsa, file_modeling_nsa_end));
    files.emplace_back("configuration_nsa.py", std::string(file_configuration_nsa, file_configuration_nsa_end));
    const int end_of_text = tokenizer->end_of_text;
    files.emplace_back("generation_config.json",
                       format_text("{\"bos_token_id\": %d, \"eos_token_id\": %d, \"pad_token_id\": %d}\n", end_of_text,
                                   end_of_text, end_of_text));
    files.emplace_back("README.md", model_card(c, model.checkpoint, to, table.parameters));
    files.emplace_back("config.json", hf_config_json(c, end_of_text));  // the last: without it nobody takes the folder
    require_empty_folder(to, "export");
    make_folders(to);
    write_safetensors(to + "/model.safetensors", {{"format", "pt"}}, tensors);
    for (const auto& [name, text] : files) write_text_file(to + "/" + name, text);
    sync_folder(to);
    print("export: %s, %d parameters, to %s\n", printable(model.checkpoint.folder), table.parameters, printable(to));
    print("load it with: AutoModelForCausalLM.from_pretrained(%s, trust_remote_code=True)\n",
          printable(json_quote(to, true)));
}

// The config.json of an export, or of what transformers saved again, in c.
inline void read_hf_config(Config& c, const std::string& folder) {
    const std::string path = folder + "/config.json";
    if (!file_exists(path)) fail("--from %s holds no config.json: it is no folder that export wrote", folder);
    const Json root = parse_json(read_file(path), path);
    const Json* type = root.find("model_type");
    if (!type || type->kind != Json::String || type->text != "nsa" || !root.find("architecture"))
        fail("%s: model_type is %s, expected \"nsa\": it is no folder that export wrote", path,
             type && type->kind == Json::String ? json_quote(type->text) : "missing");
    read_config_json(c, path);
}

// The vocabulary that came with the model; null for bytes, and where there is none.
inline std::unique_ptr<Tokenizer> read_hf_vocabulary(const Config& c, const std::string& folder) {
    if (c.tokenizer == "bytes" || !holds_vocabulary(folder)) return nullptr;
    auto found = std::make_unique<Tokenizer>(Tokenizer::gpt2(folder));
    if (c.vocab_size != found->vocab_size() || (c.vocab_digest && c.vocab_digest != found->digest()))
        fail(
            "%s holds other tokens (%d, digest %08x) than the model's vocabulary (%d, %08x): put back what export "
            "wrote",
            found->source, found->vocab_size(), found->digest(), c.vocab_size, c.vocab_digest);
    return found;
}

// A checkpoint of step 0 without moments, whose options are those of a new run with this model.
inline void import_checkpoint(Config c) {
    if (c.from.empty()) fail_usage("import: --from is missing: a folder that export wrote");
    const std::string from = c.from, to = c.out;
    apply_preset(c);
    read_hf_config(c, from);
    resolve_batch(c, 1, false);
    const std::unique_ptr<Tokenizer> tokenizer = read_hf_vocabulary(c, from);
    if (!file_exists(from + "/model.safetensors"))  // in pieces, or of PyTorch's own kind
        fail(
            "%s/model.safetensors is missing: write it, and in one piece, by model.save_pretrained(DIR, "
            "safe_serialization=True, max_shard_size=\"1TB\")",
            from);
    const SafeTensors file(from + "/model.safetensors");
    const TensorTable table(c);
    const std::vector<TensorView> tensors = find_tensors(table, file);
    require_finite(file);
    require_empty_folder(to, "import");
    make_folders(to);
    const std::string writing = begin_checkpoint(to, 0);
    const std::vector<FileRecord> records = {
        write_safetensors(writing + "/model.safetensors", {{"format", "pt"}}, tensors),
        write_text_file(writing + "/config.json", config_json(c))};
    if (tokenizer)
        write_vocabulary(c.vocab_dir = to + "/" + VOCABULARY_OF_RUN, tokenizer->tokens, tokenizer->halves_of);
    commit_checkpoint(to, 0, records, "{\"imported\": true, \"options\": " + manifest_json(c) + "}");
    print("import: %s, %d parameters, to %s\n", printable(from), table.parameters, printable(to));
    const bool knows_tokens = tokenizer || c.tokenizer == "bytes";
    print("next:   %s sample --from %s%s --prompt \"...\"\n", shell_word(program_name), shell_word(to),
          knows_tokens ? "" : " --vocab-dir DIR");
    print("--init-from %s begins a run with these weights, on the shards that --data names\n", shell_word(to));
}
